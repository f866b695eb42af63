"""Linear layer and cross-entropy in one: the logits of a few tokens at a time, and their gradient in the same bytes.

Both gradients are made in forward, where the logits exist.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ligerprof.errors import KernelInputError
from ligerprof.kernels.ce.factors import loss_divisor, reduce_losses, scale_by_device_factor, waits_for_loss_scale
from ligerprof.kernels.ce.triton import graph_is_kept, make_call
from ligerprof.kernels.flce.chunks import Gradients, Operands, run_chunks
from ligerprof.kernels.options import PLAIN_LOSS, LossOptions


def _product_dtype(hidden: Tensor) -> torch.dtype:
    """As autocast would have cast for a linear layer."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _operands(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Operands:
    return Operands(hidden.reshape(-1, hidden.shape[-1]).to(dtype), weight.to(dtype))


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


class _FusedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        num_items: Tensor | float | None,
        class_weight: Tensor | None,
        prediction: Tensor | None,
        options: LossOptions,
        track: bool,
    ) -> Tensor:
        op = _operands(hidden, weight, _product_dtype(hidden))
        ctx.options, ctx.compute_dtype = options, op.hidden_ND.dtype
        ctx.hidden_shape, ctx.hidden_dtype = hidden.shape, hidden.dtype
        loss_N = torch.empty(labels.numel(), dtype=torch.float32, device=hidden.device)
        call = make_call(labels, weight.shape[0], options, class_weight, hidden.device)
        call = dataclasses.replace(call, loss_N=loss_N, bias_V=bias, prediction_N=prediction)
        if options.reduction == "none":
            run_chunks(op, Gradients(None, None, None), call)
            ctx.save_for_backward(hidden, weight, bias, labels, class_weight)
            return loss_N.view(labels.shape)
        factor = loss_divisor(call, num_items)
        total = torch.empty((), dtype=torch.float32, device=hidden.device)
        wanted = tuple(track and needed for needed in ctx.needs_input_grad[:3])
        grads = _empty_gradients(op, weight, bias, options, wanted)
        scale = None if waits_for_loss_scale(ctx.compute_dtype) else factor
        run_chunks(op, grads, dataclasses.replace(call, scale=scale))
        reduce_losses(loss_N, factor, total)
        ctx.save_for_backward(grads.hidden_ND, _as(grads.weight_VD, weight), _as(grads.bias_V, bias), factor)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.options.reduction == "none":
            grads = _recomputed_gradients(ctx, grad_loss)
        else:
            grads = _scaled_gradients(ctx, grad_loss)
        grad_hidden = grads.hidden_ND
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(ctx.hidden_dtype).view(ctx.hidden_shape)
        return grad_hidden, grads.weight_VD, grads.bias_V, None, None, None, None, None, None


def _as(value: Tensor | None, like: Tensor | None) -> Tensor | None:
    return value if value is None or like is None else value.to(like.dtype)


def _scaled_gradients(ctx: Any, grad_loss: Tensor) -> Gradients:
    *made, factor = ctx.saved_tensors
    late = factor if waits_for_loss_scale(ctx.compute_dtype) else None
    in_place = not graph_is_kept()
    return Gradients(
        *(None if g is None else scale_by_device_factor(g, grad_loss, late, in_place=in_place) for g in made)
    )


def _recomputed_gradients(ctx: Any, grad_loss: Tensor) -> Gradients:
    """Gradients where every token has its own factor: it must be known before tokens are summed."""
    hidden, weight, bias, labels, class_weight = ctx.saved_tensors
    op = _operands(hidden, weight, ctx.compute_dtype)
    grads = _empty_gradients(op, weight, bias, ctx.options, ctx.needs_input_grad[:3])
    call = make_call(labels, weight.shape[0], ctx.options, class_weight, hidden.device)
    run_chunks(op, grads, dataclasses.replace(call, scale=grad_loss.reshape(-1).contiguous(), bias_V=bias))
    return Gradients(grads.hidden_ND, _as(grads.weight_VD, weight), _as(grads.bias_V, bias))


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
    tensors = (hidden, weight) if bias is None else (hidden, weight, bias)
    track = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return _FusedLinearCrossEntropy.apply(  # type: ignore[no-any-return]
        hidden, weight, bias, labels, num_items, class_weight, predictions, options, track
    )


def _can_hold_predictions(predictions: Tensor, labels: Tensor) -> bool:
    fits = predictions.dtype == torch.int64 and predictions.shape == labels.shape
    return fits and predictions.is_contiguous()
