"""The memory of the cross-entropy kernel."""

from ligerprof.kernels.device import never_unavailable, triton_unavailable_reason
from ligerprof.kernels.selection import applies
from ligerprof.kernels.spec import KernelMemory, KernelShape, KernelSpec
from ligerprof.torch_memory.dtypes import FP32_BYTES

_REFERENCE = "ligerprof.kernels.cross_entropy.reference:cross_entropy"


def _memory(shape: KernelShape) -> KernelMemory:
    """The gradient overwrites the logits; new are the tokens' losses and one factor."""
    return KernelMemory(
        kept_inputs=("logits",),
        output_bytes=FP32_BYTES,
        saved_bytes=FP32_BYTES,
        forward_temporary_bytes=shape.tokens * FP32_BYTES,
    )


SPECS = (
    KernelSpec(
        name="ce",
        provider="ligerprof",
        title="cross-entropy that writes the gradient over the logits",
        entry="ligerprof.kernels.cross_entropy.triton:cross_entropy",
        reference=_REFERENCE,
        slot="ce",
        memory=_memory,
        applies=applies("ce"),
        unavailable_reason=triton_unavailable_reason,
    ),
    KernelSpec(
        name="ce",
        provider="torch",
        title="cross-entropy in plain torch, upcast to fp32",
        entry=_REFERENCE,
        reference=_REFERENCE,
        slot="ce",
        memory=None,
        applies=applies("ce"),
        unavailable_reason=never_unavailable,
    ),
)
