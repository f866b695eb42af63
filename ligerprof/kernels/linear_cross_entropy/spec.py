"""The memory of the fused linear cross-entropy."""

from ligerprof.kernels.linear_cross_entropy.plan import plan_chunks
from ligerprof.kernels.spec import KernelMemory, KernelShape, plain_torch, triton_kernel
from ligerprof.torch_memory.dtypes import FP32_BYTES


def _memory(shape: KernelShape) -> KernelMemory:
    """Both gradients are computed in forward; of the logits only the workspace exists.

    The losses' factor is gone after forward, except in fp16: backward multiplies the gradients by it.
    """
    hidden_elements, product_bytes = shape.tokens * shape.hidden, shape.product_bytes
    plan = plan_chunks(
        tokens=shape.tokens,
        hidden=shape.hidden,
        vocab=shape.vocab,
        element_bytes=product_bytes,
        budget=shape.flce_budget,
        gradient_bytes=shape.parameter_bytes if shape.weight_requires_grad else 0,
    )
    cast_hidden = shape.activation_bytes != product_bytes
    return KernelMemory(
        output_bytes=FP32_BYTES,
        forward_temporary_bytes=plan.workspace_bytes + (shape.tokens + 1) * FP32_BYTES + shape.head_cast_bytes,
        forward_gradient_bytes=hidden_elements * product_bytes + shape.head_gradient_bytes,
        backward_gradient_bytes=hidden_elements * shape.activation_bytes if cast_hidden else 0,
    )


_FLCE = triton_kernel(
    "flce",
    "linear layer and cross-entropy, the logits of a few tokens at a time",
    "linear_cross_entropy:fused_linear_cross_entropy",
    _memory,
)
SPECS = (_FLCE, plain_torch(_FLCE, "linear layer and cross-entropy in plain torch"))
