"""The memory of the rotary embedding kernel."""

from dataclasses import replace

from ligerprof.kernels.spec import KernelMemory, KernelShape, plain_torch, triton_kernel


def _memory(shape: KernelShape) -> KernelMemory:
    """Keeps the angles, whose dtype `parameter_bytes` describes. Forward rotates in place; gradients are new memory."""
    elements = shape.tokens * (shape.heads + shape.kv_heads) * shape.head_dim
    return KernelMemory(kept_inputs=("cos", "sin"), backward_gradient_bytes=elements * shape.activation_bytes)


_ROPE = triton_kernel(
    "rope", "rotary embedding of queries and keys in one launch, in place", "rope:apply_rope", _memory
)
SPECS = (replace(_ROPE, entry=f"{_ROPE.entry}_in_place"), plain_torch(_ROPE, "rotary embedding in plain torch"))
