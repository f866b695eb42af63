"""Each pattern of frames names functions that the installed library has."""

import importlib.util
import re
from pathlib import Path

import pytest

from ligerprof.analyzers.attribution import frames
from tests.paths import REPOSITORY

# by pattern: frames as a recording shows them
FRAMES = {
    "NLL_CHUNK": ["ligerprof/runs/losses/chunked_nll.py:_chunk"],
    "TILED_LOSS": [
        "trl/kernels/chunked_logprob.py:forward",
        "ligerprof/runs/losses/tiled_log_probabilities.py:forward",
    ],
    "FUSED_LOSS": [
        "liger_kernel/ops/fused_linear_cross_entropy.py:forward",
        "cut_cross_entropy/cce.py:forward",
        "torch/nn/functional.py:linear_cross_entropy",
        "ligerprof/kernels/linear_cross_entropy/chunks.py:loss_and_gradients",
    ],
    "CROSS_ENTROPY": ["torch/nn/functional.py:cross_entropy", "torch/nn/functional.py:nll_loss"],
    "LOG_SOFTMAX": ["torch/nn/functional.py:log_softmax"],
    "LANGUAGE_MODEL_LOSS": [
        "transformers/loss/loss_utils.py:ForCausalLMLoss",
        "transformers/loss/loss_utils.py:ForMaskedLMLoss",
    ],
    "ANY_MODEL_LOSS": ["transformers/loss/loss_utils.py:ForSequenceClassificationLoss"],
    "COMPUTED_LOSS": ["transformers/loss/loss_utils.py:fixed_cross_entropy"],
    "LOSS_KERNEL": ["liger_kernel/ops/cross_entropy.py:cross_entropy_forward"],
    # torch's `linear` is a builtin of its C++ module
    "LINEAR_CALL": ["deepspeed/runtime/zero/linear.py:forward"],
    "LINEAR": ["torch/nn/modules/linear.py:forward", "transformers/pytorch_utils.py:forward"],
    "CONVOLUTION": ["torch/nn/modules/conv.py:_conv_forward"],
    "EMBEDDING": ["torch/nn/modules/sparse.py:forward", "torch/nn/functional.py:embedding"],
    "EMBEDDING_TABLE": ["torch/nn/modules/sparse.py:__init__"],
    "EAGER_ATTENTION": ["transformers/models/llama/modeling_llama.py:eager_attention_forward"],
    "EAGER_CALL": ["transformers/models/llama/modeling_llama.py:eager_attention_forward"],
    "CHECKPOINT": ["torch/utils/checkpoint.py:checkpoint", "torch/utils/checkpoint.py:unpack_hook"],
    "COMPILED_FORWARD": ["torch/_functorch/_aot_autograd/runtime_wrappers.py:forward"],
    "OPTIMIZER_STATE": ["torch/optim/adam.py:_init_group"],
    "GENERATION": ["transformers/generation/utils.py:generate"],
    "EVALUATION": ["transformers/trainer.py:evaluation_loop", "transformers/trainer.py:prediction_step"],
    "FSDP": ["torch/distributed/fsdp/_flat_param.py:_alloc_padded_unsharded_flat_param"],
    "FSDP2_REDUCTION": ["torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:foreach_reduce"],
    "FSDP2_ACCUMULATION": ["torch/distributed/fsdp/_fully_shard/_fsdp_param.py:to_accumulated_grad_if_needed"],
    "FSDP1_REDUCTION": ["torch/distributed/fsdp/_runtime_utils.py:_reduce_grad"],
    "FSDP2_GATHERED": ["torch/distributed/fsdp/_fully_shard/_fsdp_param.py:alloc_storage"],
    "DDP_FIRST_BUCKET": ["torch/nn/parallel/distributed.py:_ddp_init_helper"],
    "DDP_REBUILT_BUCKET": ["torch/nn/parallel/distributed.py:_pre_forward"],
    "DDP_BUCKET": [
        "torch/nn/parallel/distributed.py:_ddp_init_helper",
        "torch/nn/parallel/distributed.py:_pre_forward",
    ],
    "ZERO_FLATTEN": ["deepspeed/runtime/zero/stage_1_and_2.py:flatten_dense_tensors_aligned"],
    "ZERO_CONSTRUCTOR": ["deepspeed/runtime/zero/stage_1_and_2.py:__init__"],
    "ZERO_MASTER_COPIES": ["deepspeed/runtime/zero/stage3.py:_create_fp32_partitions"],
}


def installed(file: str) -> Path | None:
    package = file.partition("/")[0]
    found = importlib.util.find_spec(package)
    if found is None:
        return None
    return REPOSITORY / file if package == "ligerprof" else Path(str(found.origin)).parent.parent / file


@pytest.mark.parametrize("name", sorted(FRAMES))
def test_the_library_has_the_frames(name: str) -> None:
    for frame in FRAMES[name]:
        assert re.search(getattr(frames, name), frame, re.MULTILINE), frame
        file, _, function = frame.partition(":")
        if (path := installed(file)) is not None:
            assert re.search(rf"^ *(?:def|class) {function}\b", path.read_text(encoding="utf-8"), re.MULTILINE), frame


def test_every_pattern_is_held() -> None:
    assert set(FRAMES) == {name for name in vars(frames) if name.isupper()}
