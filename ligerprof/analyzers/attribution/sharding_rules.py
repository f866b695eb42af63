"""The rules for memory of distributed training: FSDP, DDP and DeepSpeed's ZeRO."""

from ligerprof.analyzers.attribution import frames
from ligerprof.analyzers.attribution.features import Feature
from ligerprof.analyzers.attribution.rule import Rule
from ligerprof.roles import Phase, Role

_BUILD, _BACKWARD = (Phase.BUILD,), (Phase.BACKWARD,)
_NOT_BUILD = tuple(phase for phase in Phase if phase is not Phase.BUILD)
# the part of FSDP that returns reduced gradients, or keeps those that are not reduced yet
_FSDP_GRADIENTS = (
    rf"{frames.FSDP2_REDUCTION}|{frames.FSDP2_ACCUMULATION}"
    r"|fsdp/_runtime_utils\.py:(?:_reduce_grad|_reduce_grad_no_shard)$"
    r"|fsdp/_flat_param\.py:prepare_gradient_for_(?:backward|optim)$"
)
# copies of a wrapped module's inputs and outputs, which are what the copied tensors are
_COPIES = (
    r"_fsdp_common\.py:_cast_fp_tensor$|distributed/utils\.py:cast_fn$|:_cast_forward_inputs$"
    r"|nn/parallel/distributed\.py:forward\ntorch/autograd/function\.py:apply$"
)
_BF16_OPTIMIZER = r"\A\S*runtime/bf16_optimizer\.py:_setup_for_real_optimizer$"
_ZERO = r"deepspeed/runtime/zero/(?!linear|tiling)|deepspeed/(?:runtime/)?comm/"
_COLLECTIVES = (
    r"distributed_c10d\.py:|distributed/_functional_collectives|distributed/_symmetric_memory"
    r"|nn/parallel/distributed\.py:|distributed/algorithms/ddp_comm_hooks/|distributed/utils\.py:_sync_"
    r"|distributed/pipelining/\w+\.py:_make_tensor_from_meta$"
)

# these come before the rules for optimizers
STATE_RULES: tuple[Rule, ...] = (
    # FSDP2 and FSDP1: the shards, also where the first forward pass pads them anew
    Rule(Role.PARAMETERS, inner=r"_fsdp_param\.py:(?:_init_sharded_param|reset_sharded_param)$"),
    Rule(Role.COMMUNICATION, has=(Feature.REDUCTION_INPUT,)),
    Rule(Role.GRADIENTS, _BACKWARD, inner=_FSDP_GRADIENTS, has_one=(Feature.OUTLIVES_PHASE, Feature.NEVER_FREED)),
    Rule(Role.GRADIENTS, _BACKWARD, has=(Feature.REDUCED,)),
    # DDP's buckets: with gradient_as_bucket_view, gradients are views of them
    Rule(Role.GRADIENTS, inner=frames.DDP_BUCKET, has=(Feature.BUCKETS_HOLD_GRADIENTS,)),
    # ZeroRedundancyOptimizer's parameters_as_bucket_view moves weights into buckets
    Rule(Role.PARAMETERS, inner=r"optim/zero_redundancy_optimizer\.py:_build_param_buckets$"),
    # DeepSpeed ZeRO's weights, master copies and gradients
    Rule(
        Role.PARAMETERS,
        _BUILD,
        inner=r"deepspeed/runtime/zero/.*:(?:flatten_dense_tensors_aligned|defragment|_partition_param)$",
    ),
    Rule(
        Role.OPTIMIZER_STATES,
        inner=r"deepspeed/runtime/.*:(?:_create_fp32_partitions|initialize_optimizer_states)$"
        r"|\A\S*fp16/(?:un)?fused_optimizer\.py:__init__$",
    ),
    Rule(Role.PARAMETERS, has=(Feature.FLAT_WEIGHTS,)),
    Rule(Role.OPTIMIZER_STATES, has=(Feature.MASTER_COPY,)),
    Rule(
        Role.GRADIENTS,
        inner=r"zero/stage_1_and_2\.py:(?:copy_grads_in_partition|_build_compact_grad_partition_buffer"
        r"|_fill_param_grad_accum_attribute)$",
    ),
    # DeepSpeed's bf16 without ZeRO: the 16-bit copy of the partition, its fp32 copy, and fp32 gradients of all weights
    Rule(Role.GRADIENTS, inner=_BF16_OPTIMIZER, has=(Feature.ONLY_OF_CALL,)),
    Rule(Role.OPTIMIZER_STATES, inner=_BF16_OPTIMIZER),
    Rule(
        Role.GRADIENTS,
        _BACKWARD,
        inner=r"\A\S*zero/linear\.py:backward$",
        has_one=(Feature.WEIGHT_SIZED, Feature.GATHERED_SIZED),
    ),
    Rule(Role.GRADIENTS, has=(Feature.GRADIENT_PARTITION,)),
)

# these come after the rules for optimizers' states; an optimizer step also gathers weights
OPTIMIZER_COMMUNICATION = Rule(
    Role.COMMUNICATION,
    (Phase.OPTIMIZER,),
    inner=rf"deepspeed/runtime/zero/partition|deepspeed/(?:runtime/)?comm/|{frames.FSDP}|{_COLLECTIVES}",
)

# these come after the rules for optimizers
COMMUNICATION_RULES: tuple[Rule, ...] = (
    # batches that a wrapper moves to the GPU
    Rule(Role.INPUTS, inner=r"distributed/utils\.py:(?:_to_kwargs|_recursive_to)$"),
    # a collective's result that backward needs, as of sequence parallelism
    Rule(
        Role.ACTIVATIONS,
        (Phase.FORWARD,),
        inner=r"distributed/_functional_collectives",
        has=(Feature.OUTLIVES_PHASE,),
    ),
    # gathered parameters, and buffers that move parameters and gradients between ranks or to the host
    Rule(Role.COMMUNICATION, inner=rf"\A(?![\s\S]*?(?:{_COPIES}))[\s\S]*?(?:{_ZERO}|{_COLLECTIVES})"),
    Rule(Role.COMMUNICATION, _NOT_BUILD, inner=rf"\A(?![\s\S]*?(?:{_COPIES}))[\s\S]*?{frames.FSDP}"),
    # a recording that ends within backward, as where memory ran out
    Rule(
        Role.ACTIVATIONS,
        _BACKWARD,
        # weights are gathered in the dtype of the computation
        node=r"^ToCopyBackward",
        has=(Feature.GATHERED_SIZED, Feature.UNFINISHED),
        lacks=(Feature.CAST_OF_GRADIENT, Feature.KEPT_BEFORE),
    ),
    Rule(
        Role.GRADIENTS,
        _BACKWARD,
        has=(Feature.GATHERED_SIZED, Feature.KEPT_SO_FAR),
        lacks=(Feature.RECOMPUTED, Feature.DROPPED_BEFORE, Feature.BY_PRODUCT),
    ),
)
