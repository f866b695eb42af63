"""The memory of the gated activations' kernels: the same bytes for every activation."""

from dataclasses import replace

from ligerprof.kernels.device import never_unavailable, triton_unavailable_reason
from ligerprof.kernels.selection import applies
from ligerprof.kernels.spec import KernelMemory, KernelShape, KernelSpec


def gated_specs(name: str, title: str) -> tuple[KernelSpec, KernelSpec, KernelSpec]:
    """The kernel of one activation, the one with the linear layer behind it, and the plain-torch version.

    Args:
        name: the word in `--liger`, and the kernel's folder, function and slot.
        title: what people call it.
    """
    ours = KernelSpec(
        name=name,
        provider="ligerprof",
        title=f"{title} that keeps gate and up alone",
        entry=f"ligerprof.kernels.{name}.triton:{name}",
        reference=f"ligerprof.kernels.{name}.reference:{name}",
        slot=name,
        memory=_memory,
        applies=applies(name),
        unavailable_reason=triton_unavailable_reason,
    )
    with_linear = replace(
        ours,
        name=f"{name}_linear",
        title=f"{title} and the linear layer behind it; backward makes the product anew",
        entry=f"{ours.entry}_linear",
        reference=f"{ours.reference}_linear",
        memory=_linear_memory,
    )
    twin = replace(
        ours,
        provider="torch",
        title=f"{title} in plain torch",
        entry=ours.reference,
        memory=None,
        unavailable_reason=never_unavailable,
    )
    return ours, with_linear, twin


def _plane_bytes(shape: KernelShape) -> int:
    return shape.tokens * shape.intermediate * shape.activation_bytes


def _memory(shape: KernelShape) -> KernelMemory:
    """Gate and up are kept; their gradients are all that backward makes."""
    return KernelMemory(
        kept_inputs=("gate", "up"),
        output_bytes=_plane_bytes(shape),
        backward_gradient_bytes=2 * _plane_bytes(shape),
    )


def _linear_memory(shape: KernelShape) -> KernelMemory:
    """As models call it: backward writes over gate and up; the product is there for the length of the call, both ways.

    Autocast's copy of the weight is kept; its gradient is there for as long as it takes to cast it.
    """
    weight_elements = shape.hidden * shape.intermediate
    cast_bytes = weight_elements * shape.activation_bytes if shape.parameter_bytes != shape.activation_bytes else 0
    weight_gradient_bytes = weight_elements * shape.parameter_bytes if shape.head_trainable else 0
    backward_bytes = _plane_bytes(shape)
    if shape.head_trainable:
        narrow_bytes = weight_elements * shape.activation_bytes
        backward_bytes = max(backward_bytes + narrow_bytes, cast_bytes and cast_bytes + weight_gradient_bytes)
    return KernelMemory(
        kept_inputs=("gate", "up", "weight"),
        output_bytes=shape.tokens * shape.hidden * shape.activation_bytes,
        saved_bytes=cast_bytes,
        # the product, and the one element that stands for it
        forward_temporary_bytes=_plane_bytes(shape) + shape.activation_bytes,
        backward_gradient_bytes=weight_gradient_bytes,
        backward_temporary_bytes=backward_bytes - weight_gradient_bytes,
    )
