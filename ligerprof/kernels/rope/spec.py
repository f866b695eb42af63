"""The memory of the rotary embedding kernel."""

from ligerprof.kernels.device import never_unavailable, triton_unavailable_reason
from ligerprof.kernels.selection import applies
from ligerprof.kernels.spec import KernelMemory, KernelShape, KernelSpec

_REFERENCE = "ligerprof.kernels.rope.reference:apply_rope"


def _memory(shape: KernelShape) -> KernelMemory:
    """Keeps the angles, whose dtype `parameter_bytes` describes. Forward rotates in place; gradients are new memory."""
    elements = shape.tokens * (shape.heads + shape.kv_heads) * shape.head_dim
    return KernelMemory(kept_inputs=("cos", "sin"), backward_gradient_bytes=elements * shape.activation_bytes)


SPECS = (
    KernelSpec(
        name="rope",
        provider="ligerprof",
        title="rotary embedding of queries and keys in one launch, in place",
        entry="ligerprof.kernels.rope.triton:apply_rope_in_place",
        reference=_REFERENCE,
        slot="rope",
        memory=_memory,
        applies=applies("rope"),
        unavailable_reason=triton_unavailable_reason,
    ),
    KernelSpec(
        name="rope",
        provider="torch",
        title="rotary embedding in plain torch",
        entry=_REFERENCE,
        reference=_REFERENCE,
        slot="rope",
        memory=None,
        applies=applies("rope"),
        unavailable_reason=never_unavailable,
    ),
)
