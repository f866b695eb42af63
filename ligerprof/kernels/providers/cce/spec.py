"""The memory of cut-cross-entropy's loss, read from the source of version 25.1.1."""

import importlib.util

from ligerprof.kernels.device import triton_unavailable_reason
from ligerprof.kernels.selection import applies
from ligerprof.kernels.spec import KernelMemory, KernelShape, KernelSpec
from ligerprof.torch_memory.dtypes import FP32_BYTES, INDEX_BYTES, INT32_BYTES

PROVIDER = "cce"
# columns that one lock of a gradient guards
_LOCKED_COLUMNS = 64


def unavailable_reason(device_kind: str) -> str | None:
    """Why it cannot run on a device of this kind, or None."""
    if importlib.util.find_spec("cut_cross_entropy") is None:
        return "cut-cross-entropy is not installed (pip install cut-cross-entropy)"
    if device_kind == "cpu":
        return "cut-cross-entropy's kernels run only on a GPU"
    if device_kind == "simulated":
        return "a simulation cannot run cut-cross-entropy: it reads the number of labels, and sorts in compiled code"
    return triton_unavailable_reason(device_kind)


def _memory(shape: KernelShape) -> KernelMemory:
    """Backward allocates zeros for both gradients, in the products' dtype; no logits are ever in memory.

    The last position of each sequence has no label; the indices of the other positions are kept.
    """
    hidden_elements, weight_elements = shape.tokens * shape.hidden, shape.vocab * shape.hidden
    counted = shape.tokens - shape.sequences
    averages_bytes = shape.vocab * FP32_BYTES
    kept_bytes = shape.tokens * INDEX_BYTES + counted * (INT32_BYTES + FP32_BYTES) + averages_bytes
    # a mask of labels and 64-bit positions come before the sums, the losses after them
    positions_bytes = shape.tokens + counted * (INDEX_BYTES - FP32_BYTES) - averages_bytes - FP32_BYTES
    narrow = shape.parameter_bytes != shape.product_bytes and shape.weight_requires_grad
    return KernelMemory(
        kept_inputs=("hidden",) if shape.activation_bytes == shape.product_bytes else (),
        output_bytes=FP32_BYTES,
        saved_bytes=kept_bytes + shape.head_cast_bytes,
        forward_temporary_bytes=max(positions_bytes, counted * FP32_BYTES),
        backward_gradient_bytes=hidden_elements * shape.activation_bytes + shape.head_gradient_bytes,
        backward_temporary_bytes=_locks_bytes(shape, counted)
        + shape.vocab * INT32_BYTES
        + (weight_elements * shape.product_bytes if narrow else 0),
    )


def _locks_bytes(shape: KernelShape, counted: int) -> int:
    """Locks of both gradients, 32 bits each."""
    across = -(-shape.hidden // _LOCKED_COLUMNS)
    return sum(-(-rows // across) * across * INT32_BYTES for rows in (counted, shape.vocab))


SPECS = (
    KernelSpec(
        name="flce",
        provider=PROVIDER,
        title="cut-cross-entropy's fused loss, which omits small probabilities from gradients",
        entry="ligerprof.kernels.providers.cce.functions:fused_linear_cross_entropy",
        reference="ligerprof.kernels.linear_cross_entropy.reference:fused_linear_cross_entropy",
        slot="flce",
        memory=_memory,
        applies=applies("flce"),
        unavailable_reason=unavailable_reason,
    ),
)
