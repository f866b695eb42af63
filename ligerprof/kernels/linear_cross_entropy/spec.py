"""The memory of the fused linear cross-entropy."""

from ligerprof.kernels.cross_entropy.spec import ResultBytes, result_bytes
from ligerprof.kernels.linear_cross_entropy.plan import plan_chunks
from ligerprof.kernels.spec import KernelMemory, KernelShape, plain_torch, triton_kernel


def _memory(shape: KernelShape) -> KernelMemory:
    """Both gradients are computed in forward; of the logits only the workspace exists.

    The losses' factor is gone after forward, except in fp16: backward multiplies the gradients by it.
    """
    results = result_bytes(shape)
    if results.waits:
        return _waiting_memory(shape, results)
    hidden_gradient_bytes = shape.input_requires_grad * shape.tokens * shape.hidden * shape.product_bytes
    workspace_bytes = _workspace_bytes(shape, with_gradient=True)
    return KernelMemory(
        output_bytes=results.output_bytes,
        forward_temporary_bytes=workspace_bytes + results.temporary_bytes + shape.head_cast_bytes,
        workspace_bytes=workspace_bytes,
        forward_gradient_bytes=hidden_gradient_bytes + shape.head_gradient_bytes + shape.factor_gradient_bytes,
        backward_gradient_bytes=_cast_gradient_bytes(shape),
    )


def _waiting_memory(shape: KernelShape, results: ResultBytes) -> KernelMemory:
    """Gradients are computed in backward, from the logits of a few tokens at a time."""
    hidden_gradient_bytes = shape.input_requires_grad * shape.tokens * shape.hidden * shape.product_bytes
    hidden_gradient_bytes += shape.tokens * shape.low_rank * shape.product_bytes
    head_gradient_bytes = shape.head_gradient_bytes + shape.vocab * shape.low_rank * shape.factor_bytes
    forward_workspace_bytes = _workspace_bytes(shape, with_gradient=False)
    launched_bytes = _workspace_bytes(shape, with_gradient=True) + results.backward_bytes + shape.head_cast_bytes
    # then the gradient of the hidden states is cast, if autocast made them narrower
    cast_bytes = _cast_gradient_bytes(shape)
    kept_bytes = head_gradient_bytes + (cast_bytes or hidden_gradient_bytes)
    peak_bytes = hidden_gradient_bytes + head_gradient_bytes + max(launched_bytes, cast_bytes)
    return KernelMemory(
        kept_inputs=("hidden", "weight"),
        output_bytes=results.output_bytes,
        forward_temporary_bytes=forward_workspace_bytes + results.temporary_bytes + shape.head_cast_bytes,
        backward_gradient_bytes=kept_bytes,
        backward_temporary_bytes=peak_bytes - kept_bytes,
    )


def _workspace_bytes(shape: KernelShape, *, with_gradient: bool) -> int:
    has_scratch = with_gradient and shape.weight_requires_grad and shape.low_rank == 0
    return plan_chunks(
        tokens=shape.tokens,
        hidden=shape.hidden,
        vocab=shape.vocab,
        element_bytes=shape.product_bytes,
        budget=shape.flce_budget,
        gradient_bytes=shape.parameter_bytes if has_scratch else 0,
        entropy="entropy" in shape.loss_returns,
    ).workspace_bytes


def _cast_gradient_bytes(shape: KernelShape) -> int:
    """The gradients of the hidden states and of the adapters' factor of them, if they are cast to their dtypes."""
    hidden = shape.hidden if shape.input_requires_grad else 0
    widths = ((hidden, shape.activation_bytes), (shape.low_rank, shape.factor_bytes))
    return sum(shape.tokens * width * size for width, size in widths if size != shape.product_bytes)


_FLCE = triton_kernel(
    "flce",
    "linear layer and cross-entropy, the logits of a few tokens at a time",
    "linear_cross_entropy:fused_linear_cross_entropy",
    _memory,
)
SPECS = (_FLCE, plain_torch(_FLCE, "linear layer and cross-entropy in plain torch"))
