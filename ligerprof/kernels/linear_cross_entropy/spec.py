"""The memory of the fused linear cross-entropy."""

from ligerprof.kernels.device import never_unavailable, triton_unavailable_reason
from ligerprof.kernels.linear_cross_entropy.plan import plan_chunks
from ligerprof.kernels.selection import applies
from ligerprof.kernels.spec import KernelMemory, KernelShape, KernelSpec
from ligerprof.torch_memory.dtypes import FP32_BYTES

_REFERENCE = "ligerprof.kernels.linear_cross_entropy.reference:fused_linear_cross_entropy"


def _memory(shape: KernelShape) -> KernelMemory:
    """Both gradients are computed in forward; of the logits only the workspace exists."""
    hidden_elements, weight_elements = shape.tokens * shape.hidden, shape.vocab * shape.hidden
    product_bytes = shape.product_bytes
    cast_hidden = shape.activation_bytes != product_bytes
    plan = plan_chunks(
        tokens=shape.tokens,
        hidden=shape.hidden,
        vocab=shape.vocab,
        element_bytes=product_bytes,
        budget=shape.flce_budget,
        gradient_bytes=shape.parameter_bytes if shape.weight_requires_grad else 0,
    )
    weight_gradient_bytes = weight_elements * shape.parameter_bytes if shape.weight_requires_grad else 0
    return KernelMemory(
        output_bytes=FP32_BYTES,
        saved_bytes=FP32_BYTES,
        forward_temporary_bytes=plan.workspace_bytes + shape.tokens * FP32_BYTES + _cast_bytes(shape),
        forward_gradient_bytes=hidden_elements * product_bytes + weight_gradient_bytes,
        backward_gradient_bytes=hidden_elements * shape.activation_bytes if cast_hidden else 0,
    )


def _cast_bytes(shape: KernelShape) -> int:
    """Autocast's copies of the hidden states and of the head's weight."""
    hidden_elements = shape.tokens * shape.hidden if shape.activation_bytes != shape.product_bytes else 0
    weight_elements = shape.vocab * shape.hidden if shape.parameter_bytes != shape.product_bytes else 0
    return (hidden_elements + weight_elements) * shape.product_bytes


SPECS = (
    KernelSpec(
        name="flce",
        provider="ligerprof",
        title="linear layer and cross-entropy, the logits of a few tokens at a time",
        entry="ligerprof.kernels.linear_cross_entropy.triton:fused_linear_cross_entropy",
        reference=_REFERENCE,
        slot="flce",
        memory=_memory,
        applies=applies("flce"),
        unavailable_reason=triton_unavailable_reason,
    ),
    KernelSpec(
        name="flce",
        provider="torch",
        title="linear layer and cross-entropy in plain torch",
        entry=_REFERENCE,
        reference=_REFERENCE,
        slot="flce",
        memory=None,
        applies=applies("flce"),
        unavailable_reason=never_unavailable,
    ),
)
