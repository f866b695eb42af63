"""What the kernel tells ligerprof about itself. No torch here: `ligerprof estimate` reads it without."""

from ligerprof.kernels import KernelMemory, KernelShape, KernelSpec
from ligerprof.kernels.selection import applies


def memory(shape: KernelShape) -> KernelMemory:
    """Gate and up are kept; silu(gate) is made again in backward."""
    plane_bytes = shape.tokens * shape.intermediate * shape.activation_bytes
    return KernelMemory(
        kept_inputs=("gate", "up"),
        output_bytes=plane_bytes,
        forward_temporary_bytes=plane_bytes,
        backward_gradient_bytes=2 * plane_bytes,
        backward_temporary_bytes=plane_bytes,
    )


def unavailable_reason(device_kind: str) -> str | None:
    """Plain torch runs on every kind of device."""
    return None


SPECS = (
    KernelSpec(
        name="swiglu",
        provider="example",
        title="SwiGLU that recomputes silu(gate), in plain torch",
        entry="ligerprof_example_plugin.swiglu:swiglu",
        reference="ligerprof.kernels.gated.reference:swiglu",
        slot="swiglu",
        memory=memory,
        applies=applies("swiglu"),
        unavailable_reason=unavailable_reason,
    ),
)
