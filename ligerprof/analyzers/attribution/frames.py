"""Patterns of Python frames, written as `file:function`: one per fact, with the version of the library that has them.

A stack is one frame per line, the innermost first: `^` and `$` match at each line, `\\A` at the innermost frame.
"""

# losses. TRL 1.14 (sft_trainer.py), TRL 1.16 (kernels/chunked_logprob.py), and our versions of them
NLL_CHUNK = r"(?:sft_trainer|chunked_nll)\.py:_chunk$"
TILED_LOSS = r"trl/kernels/chunked_logprob\.py|losses/tiled_log_probabilities\.py"
# liger-kernel 0.8.5, cut-cross-entropy 25.1, torch 2.13, and our own: the head's product in parts, with the loss
FUSED_LOSS = (
    r"fused_linear_cross_entropy|linear_cross_entropy/|cut_cross_entropy/|/functional\.py:linear_cross_entropy$|"
    + TILED_LOSS
)
# torch 2.13
CROSS_ENTROPY = r"/functional\.py:(?:cross_entropy|nll_loss)$"
LOG_SOFTMAX = r"/functional\.py:log_softmax$"
# transformers 5.23
LANGUAGE_MODEL_LOSS = r"loss_utils\.py:For(?:CausalLM|MaskedLM)Loss$"
ANY_MODEL_LOSS = r"loss_utils\.py:\w+Loss$"
COMPUTED_LOSS = r"loss_utils\.py:fixed_cross_entropy$"
# liger-kernel 0.8.5 and our own
LOSS_KERNEL = r"liger_kernel/ops/cross_entropy\.py|kernels/cross_entropy/"

# layers. torch 2.13; DeepSpeed 0.19 replaces `linear` under ZeRO-3; transformers 5.23 has Conv1D in pytorch_utils.py
LINEAR_CALL = r"/functional\.py:linear$|zero/linear\.py:"
LINEAR = LINEAR_CALL + r"|nn/modules/linear\.py:forward$|pytorch_utils\.py:forward$"
CONVOLUTION = r"nn/modules/conv\.py:_conv_forward$"
EMBEDDING = r"nn/modules/sparse\.py:forward$|nn/functional\.py:embedding$"
EMBEDDING_TABLE = r"nn/modules/sparse\.py:__init__$"
# transformers 5.23, in each modeling module
EAGER_ATTENTION = "eager_attention_forward"
EAGER_CALL = rf":{EAGER_ATTENTION}$"

# torch 2.13: checkpointing, and functions that each torch optimizer has
CHECKPOINT = r"torch/utils/checkpoint\.py"
OPTIMIZER_STATE = r":_?init_(?:group|state)$"
# torch 2.11 and 2.13: the forward pass of a compiled function, which may have no module whose call is seen
COMPILED_FORWARD = r"_aot_autograd/runtime_wrappers\.py:forward$"
# transformers 5.23
GENERATION = r"(?:^|/)transformers/generation/"
# transformers 5.23, Lightning 2.6: calls of trainers under which an evaluation runs
EVALUATION = r":(?:evaluation_loop|prediction_step|validation_step|_run_evaluate|_evaluation_step)$"

# torch 2.13: FSDP1 and FSDP2, the latter in distributed/_composable/ before torch 2.6
FSDP = r"distributed/(?:fsdp|_composable)/"
# functions that copy gradients into the buffer that is reduced, and then drop them
FSDP2_REDUCTION = r"_fsdp_collectives\.py:foreach_reduce$"
# without synchronization, each gradient is cast by itself
FSDP2_ACCUMULATION = r"_fsdp_param\.py:to_accumulated_grad_if_needed$"
FSDP1_REDUCTION = r"fsdp/_runtime_utils\.py:_reduce_grad$"
FSDP2_GATHERED = r"_fsdp_param\.py:alloc_storage$"
# DDP's reducer allocates its buckets when it is built, and again before the second forward pass
DDP_FIRST_BUCKET = r"\A\S*nn/parallel/distributed\.py:_ddp_init_helper$"
DDP_REBUILT_BUCKET = r"\A\S*nn/parallel/distributed\.py:_pre_forward$"
DDP_BUCKET = rf"{DDP_FIRST_BUCKET}|{DDP_REBUILT_BUCKET}|\A\S*nn/parallel/distributed\.py:_rebuild_buckets$"
# DeepSpeed 0.19
ZERO_FLATTEN = r":flatten_dense_tensors_aligned$"
ZERO_MASTER_COPIES = r":_create_fp32_partitions$"
ZERO_CONSTRUCTOR = r"\A\S*zero/stage_1_and_2\.py:__init__$"
