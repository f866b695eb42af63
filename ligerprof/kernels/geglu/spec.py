"""What the GeGLU kernel and its plain-torch twin cost."""

from dataclasses import replace

from ligerprof.kernels.device import never_unavailable, triton_unavailable_reason
from ligerprof.kernels.selection import applies
from ligerprof.kernels.spec import KernelMemory, KernelShape, KernelSpec

_REFERENCE = "ligerprof.kernels.geglu.reference:geglu"


def _memory(shape: KernelShape) -> KernelMemory:
    """Gate and up are kept; their gradients are all that backward makes."""
    plane_bytes = shape.tokens * shape.intermediate * shape.activation_bytes
    return KernelMemory(
        kept_inputs=("gate", "up"),
        output_bytes=plane_bytes,
        backward_gradient_bytes=2 * plane_bytes,
    )


def _reference_memory(shape: KernelShape) -> KernelMemory:
    """Plain torch keeps gelu(gate) too, and frees it in time for the gradient of gelu."""
    plane_bytes = shape.tokens * shape.intermediate * shape.activation_bytes
    return replace(_memory(shape), saved_bytes=plane_bytes)


SPECS = (
    KernelSpec(
        name="geglu",
        provider="ligerprof",
        title="GeGLU that keeps gate and up alone",
        entry="ligerprof.kernels.geglu.triton:geglu",
        reference=_REFERENCE,
        slot="geglu",
        memory=_memory,
        applies=applies("geglu"),
        unavailable_reason=triton_unavailable_reason,
    ),
    KernelSpec(
        name="geglu",
        provider="torch",
        title="GeGLU in plain torch",
        entry=_REFERENCE,
        reference=_REFERENCE,
        slot="geglu",
        memory=_reference_memory,
        applies=applies("geglu"),
        unavailable_reason=never_unavailable,
    ),
)
