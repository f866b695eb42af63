"""Linear layer and cross-entropy in one: the logits of a few tokens at a time, and their gradient in the same bytes.

Both gradients are made in forward, where the logits exist.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ligerprof.errors import KernelInputError
from ligerprof.kernels.cross_entropy.factors import scale_by_device_factor, waits_for_loss_scale
from ligerprof.kernels.cross_entropy.triton import LossRequest, compute_loss, graph_is_kept
from ligerprof.kernels.linear_cross_entropy.chunks import Gradients, Operands, run_chunks
from ligerprof.kernels.options import PLAIN_LOSS, LossOptions


def loss_and_gradients(
    inputs: tuple[Tensor, Tensor, Tensor | None], dtype: torch.dtype, request: LossRequest, wanted: tuple[bool, ...]
) -> tuple[Tensor, Gradients, Tensor | None]:
    """The loss, its gradients, and the factor in it; where `waits_for_loss_scale`, gradients still lack that factor.

    Args:
        inputs: hidden states, weight and bias.
        dtype: of the products.
        wanted: of which of the inputs a gradient is.
    """
    hidden, weight, bias = inputs
    op = Operands(hidden.reshape(-1, hidden.shape[-1]).to(dtype), weight.to(dtype))
    grads = _empty_gradients(op, weight, bias, request.options, wanted)
    loss, factor = compute_loss(
        request,
        weight.shape[0],
        lambda call: run_chunks(op, grads, dataclasses.replace(call, bias_V=bias)),
        op.hidden_ND,
    )
    return loss, _in_dtypes(grads, weight, bias), factor


def _empty_gradients(
    op: Operands, weight: Tensor, bias: Tensor | None, options: LossOptions, wanted: tuple[bool, ...]
) -> Gradients:
    """Buffers that the first tokens' products write whole, so none is filled with zeros."""
    weight_dtype = torch.float32 if options.accumulate_fp32 else weight.dtype
    return Gradients(
        hidden_ND=torch.empty_like(op.hidden_ND, memory_format=torch.contiguous_format) if wanted[0] else None,
        weight_VD=torch.empty(weight.shape, dtype=weight_dtype, device=weight.device) if wanted[1] else None,
        bias_V=torch.empty_like(bias, dtype=weight_dtype) if bias is not None and wanted[2] else None,
    )


def _in_dtypes(grads: Gradients, weight: Tensor, bias: Tensor | None) -> Gradients:
    """The head's gradients as its parameters are; the hidden states' waits for its dtype until backward."""
    return Gradients(
        grads.hidden_ND,
        None if grads.weight_VD is None else grads.weight_VD.to(weight.dtype),
        None if grads.bias_V is None or bias is None else grads.bias_V.to(bias.dtype),
    )


class _FusedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        request: LossRequest,
        track: bool,
    ) -> Tensor:
        waits = request.options.reduction == "none"
        wanted = tuple(track and needed and not waits for needed in ctx.needs_input_grad[:3])
        loss, grads, factor = loss_and_gradients((hidden, weight, bias), dtype, request, wanted)
        ctx.dtype, ctx.request = dtype, dataclasses.replace(request, predictions=None)
        ctx.hidden_shape, ctx.hidden_dtype = hidden.shape, hidden.dtype
        if waits:
            ctx.save_for_backward(hidden, weight, bias)
        else:
            ctx.save_for_backward(grads.hidden_ND, grads.weight_VD, grads.bias_V, factor)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.request.options.reduction == "none":
            # every token has its own factor, which must be known before tokens are summed
            request = dataclasses.replace(ctx.request, token_scale=grad_loss)
            _, grads, _ = loss_and_gradients(ctx.saved_tensors, ctx.dtype, request, ctx.needs_input_grad[:3])
        else:
            grads = _scaled_gradients(ctx, grad_loss)
        grad_hidden = grads.hidden_ND
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(ctx.hidden_dtype).view(ctx.hidden_shape)
        return grad_hidden, grads.weight_VD, grads.bias_V, None, None, None


def _scaled_gradients(ctx: Any, grad_loss: Tensor) -> Gradients:
    *made, factor = ctx.saved_tensors
    late = factor if waits_for_loss_scale(ctx.dtype) else None
    in_place = not graph_is_kept()
    return Gradients(
        *(None if g is None else scale_by_device_factor(g, grad_loss, late, in_place=in_place) for g in made)
    )


def fused_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    options: LossOptions = PLAIN_LOSS,
    bias: Tensor | None = None,
    num_items: Tensor | float | None = None,
    class_weight: Tensor | None = None,
    predictions: Tensor | None = None,
) -> Tensor:
    """Cross-entropy of `hidden @ weight.T + bias` against labels, in fp32, the logits never whole.

    Under autocast the products run in its dtype, and the weight's gradient is summed in the weight's own.
    Where no label counts, the loss and its gradients are zero (torch's mean is NaN there).

    Args:
        hidden: [..., D].
        weight: [V, D].
        labels: [...], of the hidden states' leading shape.
        num_items: what the summed loss is divided by instead of the count, where the reduction is `mean`;
            a tensor stays on its device.
        class_weight: [V], what a label's loss is multiplied by; a mean divides by the weights of the labels.
        predictions: int64, contiguous, of the labels' shape: takes each position's likeliest word, -1 where the
            label is ignored.

    Raises:
        KernelInputError: shapes that do not go together.
    """
    if labels.shape != hidden.shape[:-1] or hidden.shape[-1] != weight.shape[-1]:
        raise KernelInputError(
            f"flce: hidden states {tuple(hidden.shape)}, a head of {tuple(weight.shape)} and labels"
            f" {tuple(labels.shape)} do not go together. Labels need the hidden states' leading shape."
        )
    if predictions is not None and not _can_hold_predictions(predictions, labels):
        raise KernelInputError(
            f"flce: predictions are a {predictions.dtype} tensor of {tuple(predictions.shape)}. They need int64, the"
            f" labels' shape {tuple(labels.shape)}, and no gaps: torch.empty_like(labels)."
        )
    dtype = _product_dtype(hidden)
    request = LossRequest(
        labels=labels,
        options=options,
        num_items=num_items,
        class_weight=class_weight,
        predictions=predictions,
    )
    if torch.compiler.is_compiling():
        from ligerprof.kernels.linear_cross_entropy.compiled import compiled_loss

        return compiled_loss((hidden, weight, bias), dtype, request)
    tensors = (hidden, weight) if bias is None else (hidden, weight, bias)
    track = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return _FusedLinearCrossEntropy.apply(hidden, weight, bias, dtype, request, track)  # type: ignore[no-any-return]


def _product_dtype(hidden: Tensor) -> torch.dtype:
    """As autocast would have cast for a linear layer."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _can_hold_predictions(predictions: Tensor, labels: Tensor) -> bool:
    fits = predictions.dtype == torch.int64 and predictions.shape == labels.shape
    return fits and predictions.is_contiguous()
