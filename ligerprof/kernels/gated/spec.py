"""The memory cost of the gated kernels, which does not depend on the activation."""

from ligerprof.kernels.spec import KernelMemory, KernelShape, KernelSpec, plain_torch, triton_kernel


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


def _specs(slot: str, title: str) -> tuple[KernelSpec, ...]:
    """The kernel of one activation, the one that includes the linear layer, and the plain-torch reference."""
    alone = triton_kernel(slot, f"{title} that saves only gate and up", f"gated:{slot}", _memory)
    variant = f"{slot}_linear"
    with_linear = triton_kernel(
        slot,
        f"{title} and the linear layer after it; backward recomputes the product",
        f"gated:{variant}",
        _linear_memory,
        name=variant,
    )
    return alone, with_linear, plain_torch(alone, f"{title} in plain torch")


SPECS = (*_specs("swiglu", "SwiGLU"), *_specs("geglu", "GeGLU"))
