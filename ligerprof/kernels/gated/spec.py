"""The memory cost of the gated kernels, which does not depend on the activation."""

from dataclasses import replace

from ligerprof.kernels.device import never_unavailable, triton_unavailable_reason
from ligerprof.kernels.selection import applies
from ligerprof.kernels.spec import KernelMemory, KernelShape, KernelSpec

_FOLDER = "ligerprof.kernels.gated"


def _gate_bytes(shape: KernelShape) -> int:
    return shape.tokens * shape.intermediate * shape.activation_bytes


def _memory(shape: KernelShape) -> KernelMemory:
    """Keeps gate and up; backward allocates their gradients and nothing else."""
    return KernelMemory(
        kept_inputs=("gate", "up"),
        output_bytes=_gate_bytes(shape),
        backward_gradient_bytes=2 * _gate_bytes(shape),
    )


def _linear_memory(shape: KernelShape) -> KernelMemory:
    """Keeps gate and up, which backward overwrites; the product exists only during the calls of forward and backward.

    Autocast's copy of the weight is kept. Its gradient exists until it is cast to the weight's dtype.
    """
    weight_elements = shape.hidden * shape.intermediate
    cast_bytes = weight_elements * shape.activation_bytes if shape.parameter_bytes != shape.activation_bytes else 0
    weight_gradient_bytes = weight_elements * shape.parameter_bytes if shape.weight_requires_grad else 0
    backward_bytes = _gate_bytes(shape)
    if shape.weight_requires_grad:
        narrow_bytes = weight_elements * shape.activation_bytes
        backward_bytes = max(backward_bytes + narrow_bytes, cast_bytes and cast_bytes + weight_gradient_bytes)
    return KernelMemory(
        kept_inputs=("gate", "up", "weight"),
        output_bytes=shape.tokens * shape.hidden * shape.activation_bytes,
        saved_bytes=cast_bytes,
        # the product, and the placeholder's one element
        forward_temporary_bytes=_gate_bytes(shape) + shape.activation_bytes,
        backward_gradient_bytes=weight_gradient_bytes,
        backward_temporary_bytes=backward_bytes - weight_gradient_bytes,
    )


def _specs(name: str, title: str) -> tuple[KernelSpec, KernelSpec, KernelSpec]:
    """The kernel of one activation, the one that includes the linear layer, and the plain-torch reference.

    Args:
        name: the slot, and the function in `triton` and `reference`.
        title: the activation's name in text.
    """
    alone = KernelSpec(
        name=name,
        provider="ligerprof",
        title=f"{title} that keeps gate and up alone",
        entry=f"{_FOLDER}.triton:{name}",
        reference=f"{_FOLDER}.reference:{name}",
        slot=name,
        memory=_memory,
        applies=applies(name),
        unavailable_reason=triton_unavailable_reason,
    )
    with_linear = replace(
        alone,
        name=f"{name}_linear",
        title=f"{title} and the linear layer behind it; backward makes the product anew",
        entry=f"{alone.entry}_linear",
        reference=f"{alone.reference}_linear",
        memory=_linear_memory,
    )
    reference = replace(
        alone,
        provider="torch",
        title=f"{title} in plain torch",
        entry=alone.reference,
        memory=None,
        unavailable_reason=never_unavailable,
    )
    return alone, with_linear, reference


SPECS = (*_specs("swiglu", "SwiGLU"), *_specs("geglu", "GeGLU"))
