"""The fused loss as one opaque operation of a compiled graph: no graph break, and the memory of the plain call."""

from typing import Any

import torch
from torch import Tensor

from ligerprof.kernels.cross_entropy.compiled import carried, request_of, scaled
from ligerprof.kernels.cross_entropy.factors import waits_for_loss_scale
from ligerprof.kernels.cross_entropy.triton import LossRequest
from ligerprof.kernels.linear_cross_entropy.triton import loss_and_gradients
from ligerprof.kernels.options import options_from_text

# elements of what the operation returns in place of a tensor that was not wanted
_NOTHING = 0


def compiled_loss(inputs: tuple[Tensor, Tensor, Tensor | None], dtype: torch.dtype, request: LossRequest) -> Tensor:
    """The loss, where torch.compile traces the call."""
    track = torch.is_grad_enabled()
    wanted = [track and value is not None and value.requires_grad for value in inputs]
    loss: Tensor
    loss, predictions, *_ = _loss(*inputs, *carried(request), wanted, request.predictions is not None, dtype)
    if request.predictions is not None:
        request.predictions.copy_(predictions)
    return loss


@torch.library.custom_op("ligerprof::fused_linear_cross_entropy", mutates_args=())
def _loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    class_weight: Tensor | None,
    num_items: Tensor | None,
    divisor: float | None,
    token_scale: Tensor | None,
    options: str,
    wanted: list[bool],
    predict: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss, predictions, gradients of hidden states, head and bias, and the factor they lack; empty where not wanted.

    Without reduction there are gradients only once `token_scale` is known.
    """
    predictions = torch.empty_like(labels, memory_format=torch.contiguous_format) if predict else None
    request = request_of((labels, class_weight, num_items, divisor, token_scale, options), predictions)
    now = _now(wanted, options, token_scale)
    loss, grads, factor = loss_and_gradients((hidden, weight, bias), dtype, request, now)
    grad_hidden = None if grads.hidden_ND is None else grads.hidden_ND.view(hidden.shape).to(hidden.dtype)
    results = (predictions, grad_hidden, grads.weight_VD, grads.bias_V, factor if waits_for_loss_scale(dtype) else None)
    given = (hidden.new_empty(_NOTHING) if value is None else value for value in results)
    return (loss, *given)  # type: ignore[return-value]


def _now(wanted: list[bool], options: str, token_scale: Tensor | None) -> tuple[bool, ...]:
    """Which gradients this call makes."""
    waits = options_from_text(options).reduction == "none" and token_scale is None
    return tuple(want and not waits for want in wanted)


@_loss.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *others: Any) -> tuple[Tensor, ...]:
    *_, token_scale, options, wanted, predict, dtype = others
    reduced = options_from_text(options).reduction != "none"
    loss = hidden.new_empty(() if reduced else labels.shape, dtype=torch.float32)
    now = _now(wanted, options, token_scale)
    grads = (
        value.new_empty(value.shape) if value is not None and want else hidden.new_empty(_NOTHING)
        for value, want in zip((hidden, weight, bias), now, strict=True)
    )
    predictions = labels.new_empty(labels.shape) if predict else hidden.new_empty(_NOTHING)
    waits = reduced and waits_for_loss_scale(dtype)
    late = hidden.new_empty(1, dtype=torch.float32) if waits else hidden.new_empty(_NOTHING)
    return (loss, predictions, *grads, late)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.divisor, _, ctx.options, ctx.wanted, _, ctx.dtype = inputs
    ctx.waits = options_from_text(ctx.options).reduction == "none"
    ctx.save_for_backward(*(tensors if ctx.waits else output[2:]))
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.waits:
        rest = (ctx.divisor, grad_loss, ctx.options, ctx.wanted, False, ctx.dtype)
        _, _, *grads, _ = _loss(*ctx.saved_tensors, *rest)
    else:
        *made, late = ctx.saved_tensors
        grads = [scaled(value, grad_loss, late) for value in made]
    wanted = [grad if want else None for grad, want in zip(grads, ctx.wanted, strict=True)]
    return (*wanted, *[None] * 9)


_loss.register_autograd(_backward, setup_context=_keep)
