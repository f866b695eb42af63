"""Cross-entropy as one opaque operation of a compiled graph: no graph break, the gradient a tensor of its own."""

from typing import Any

import torch
from torch import Tensor

from ligerprof.kernels.cross_entropy.factors import scale_by_device_factor, waits_for_loss_scale
from ligerprof.kernels.cross_entropy.triton import LossRequest, as_rows, loss_of_logits
from ligerprof.kernels.options import LossOptions, options_as_text, options_from_text

# labels, class weight, number of items on the device, the same as a number, scale of each token, options as text
Carried = tuple[Tensor, Tensor | None, Tensor | None, float | None, Tensor | None, str]


def carried(request: LossRequest) -> Carried:
    """A request as the arguments of an operation, which takes tensors and plain values alone."""
    items = request.num_items
    number = None if items is None or isinstance(items, Tensor) else float(items)
    tensor = items if isinstance(items, Tensor) else None
    return request.labels, request.class_weight, tensor, number, request.token_scale, options_as_text(request.options)


def request_of(arguments: Carried, predictions: Tensor | None = None) -> LossRequest:
    """The inverse of `carried`."""
    labels, class_weight, num_items, divisor, token_scale, options = arguments
    return LossRequest(
        labels=labels,
        options=options_from_text(options),
        num_items=divisor if num_items is None else num_items,
        class_weight=class_weight,
        predictions=predictions,
        token_scale=token_scale,
    )


def compiled_loss(logits: Tensor, request: LossRequest) -> Tensor:
    """The loss, where torch.compile traces the call."""
    loss: Tensor
    loss, *_ = _loss(logits, *carried(request), torch.is_grad_enabled() and logits.requires_grad)
    return loss


@torch.library.custom_op("ligerprof::cross_entropy", mutates_args=())
def _loss(
    logits: Tensor,
    labels: Tensor,
    class_weight: Tensor | None,
    num_items: Tensor | None,
    divisor: float | None,
    token_scale: Tensor | None,
    options: str,
    wanted: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, gradient of the logits, and the factor it lacks; empty where there is none.

    Without reduction there is a gradient only once `token_scale` is known.
    """
    request = request_of((labels, class_weight, num_items, divisor, token_scale, options))
    now = _now(wanted, request.options, token_scale)
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format) if now else None
    loss, factor = loss_of_logits(as_rows(logits), None if grad is None else as_rows(grad), request)
    late = factor if waits_for_loss_scale(logits.dtype) else None
    nothing = logits.new_empty(0, dtype=torch.float32)
    return loss, logits.new_empty(0) if grad is None else grad, nothing if late is None else late


def _now(wanted: bool, options: LossOptions, token_scale: Tensor | None) -> bool:
    return wanted and (options.reduction != "none" or token_scale is not None)


@_loss.register_fake
def _(logits: Tensor, labels: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, token_scale, options, wanted = others
    read = options_from_text(options)
    reduced = read.reduction != "none"
    loss = logits.new_empty(() if reduced else labels.shape, dtype=torch.float32)
    grad = logits.new_empty(logits.shape if _now(wanted, read, token_scale) else 0)
    return loss, grad, logits.new_empty(int(reduced and waits_for_loss_scale(logits.dtype)), dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.divisor, _, ctx.options, _ = inputs
    ctx.waits = options_from_text(ctx.options).reduction == "none"
    ctx.save_for_backward(*(tensors if ctx.waits else output[1:]))
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.waits:
        rest = (ctx.divisor, grad_loss, ctx.options, True)
        _, grad, _ = _loss(*ctx.saved_tensors, *rest)
    else:
        made, late = ctx.saved_tensors
        grad = scaled(made, grad_loss, late)
    return grad, *[None] * 7


_loss.register_autograd(_backward, setup_context=_keep)


@torch.library.custom_op("ligerprof::scaled", mutates_args=())
def scaled(value: Tensor, factor: Tensor, late: Tensor) -> Tensor:
    """`value * factor`, times `late` where there is one, multiplied in fp32: torch would round the factor first."""
    return scale_by_device_factor(value, factor, late if late.numel() else None, in_place=False)


@scaled.register_fake
def _(value: Tensor, factor: Tensor, late: Tensor) -> Tensor:  # noqa: ARG001
    return torch.empty_like(value)
