"""The memory of the cross-entropy kernel."""

from dataclasses import dataclass

from ligerprof.kernels.options import WITH_GRADIENT
from ligerprof.kernels.spec import KernelMemory, KernelShape, plain_torch, triton_kernel
from ligerprof.torch_memory.dtypes import FP32_BYTES, INDEX_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultBytes:
    """The bytes of a reduced loss and of what it returns besides.

    Attributes:
        output_bytes: the results.
        temporary_bytes: the tokens' losses, their factor, and what some results are reduced from.
        waits: whether gradients are computed in backward, because a result has a gradient.
        backward_bytes: of one launch in backward: the tokens' losses, which nobody reads, and their factor.
    """

    output_bytes: int
    temporary_bytes: int
    waits: bool
    backward_bytes: int


def result_bytes(shape: KernelShape) -> ResultBytes:
    """The bytes of the results in `shape.loss_returns`."""
    names, tokens = shape.loss_returns, shape.tokens
    losses_and_factor = (tokens + 1) * FP32_BYTES
    output_bytes, temporary_bytes = FP32_BYTES, losses_and_factor
    for name in names:
        if name in WITH_GRADIENT:
            output_bytes += tokens * FP32_BYTES
        elif name == "predicted_tokens":
            output_bytes += tokens * INDEX_BYTES
        else:
            output_bytes += FP32_BYTES
    if "z_loss" in names:
        temporary_bytes += tokens * FP32_BYTES
    if "token_accuracy" in names and "predicted_tokens" not in names:
        temporary_bytes += tokens * INDEX_BYTES
    return ResultBytes(
        output_bytes=output_bytes,
        temporary_bytes=temporary_bytes,
        waits=any(name in names for name in WITH_GRADIENT),
        backward_bytes=losses_and_factor,
    )


# the highest logit, the sum of exponentials relative to it, the label's logit, the (weighted) sum of logits
_PLAIN = 4


def statistics_per_token(*, entropy: bool) -> int:
    """Number of fp32 statistics; entropies need the sum of exponentials times their exponents, too."""
    return _PLAIN + int(entropy)


def statistics_bytes(*, entropy: bool = False) -> int:
    """Bytes of one token's statistics."""
    return statistics_per_token(entropy=entropy) * FP32_BYTES


def _memory(shape: KernelShape) -> KernelMemory:
    """The gradient overwrites the logits; new are the results, the tokens' losses and a factor, which fp16 keeps."""
    results = result_bytes(shape)
    return KernelMemory(
        kept_inputs=("logits",),
        output_bytes=results.output_bytes,
        forward_temporary_bytes=results.temporary_bytes,
        backward_temporary_bytes=results.backward_bytes if results.waits else 0,
    )


_CE = triton_kernel(
    "ce", "cross-entropy that writes the gradient over the logits", "cross_entropy:cross_entropy", _memory
)
SPECS = (_CE, plain_torch(_CE, "cross-entropy in plain torch, upcast to fp32"))
