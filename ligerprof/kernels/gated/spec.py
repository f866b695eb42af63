"""What the kernels of gated activations and their plain-torch twins cost: the same bytes whatever the activation."""

from dataclasses import replace

from ligerprof.kernels.device import never_unavailable, triton_unavailable_reason
from ligerprof.kernels.selection import applies
from ligerprof.kernels.spec import KernelMemory, KernelShape, KernelSpec


def gated_specs(name: str, title: str) -> tuple[KernelSpec, KernelSpec]:
    """The kernel of one activation, and its twin in plain torch.

    Args:
        name: the word in `--liger`, and the kernel's folder, function and slot.
        title: what people call it.
    """
    reference = f"ligerprof.kernels.{name}.reference:{name}"
    ours = KernelSpec(
        name=name,
        provider="ligerprof",
        title=f"{title} that keeps gate and up alone",
        entry=f"ligerprof.kernels.{name}.triton:{name}",
        reference=reference,
        slot=name,
        memory=_memory,
        applies=applies(name),
        unavailable_reason=triton_unavailable_reason,
    )
    twin = replace(
        ours,
        provider="torch",
        title=f"{title} in plain torch",
        entry=reference,
        memory=_reference_memory,
        unavailable_reason=never_unavailable,
    )
    return ours, twin


def _memory(shape: KernelShape) -> KernelMemory:
    """Gate and up are kept; their gradients are all that backward makes."""
    plane_bytes = shape.tokens * shape.intermediate * shape.activation_bytes
    return KernelMemory(
        kept_inputs=("gate", "up"),
        output_bytes=plane_bytes,
        backward_gradient_bytes=2 * plane_bytes,
    )


def _reference_memory(shape: KernelShape) -> KernelMemory:
    """Plain torch keeps act(gate) too, and frees it in time for the gradient of the activation."""
    plane_bytes = shape.tokens * shape.intermediate * shape.activation_bytes
    return replace(_memory(shape), saved_bytes=plane_bytes)
