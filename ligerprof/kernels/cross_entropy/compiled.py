"""Losses as opaque operations of a compiled graph: no graph break, and each gradient in a tensor of its own.

An operation takes its sources (tensors that may want a gradient), the six values of `pack_request`, the logits' dtype
and `wanted` (which sources want a gradient). It returns the loss, a gradient per source, and the factors that the
gradients still lack, one per source. An empty tensor replaces each result that does not exist.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ligerprof.kernels.cross_entropy.factors import scale_by_device_factor, waits_for_loss_scale
from ligerprof.kernels.cross_entropy.loss import loss_of_logits
from ligerprof.kernels.options import LossOptions, LossRequest, options_as_text, options_from_text
from ligerprof.kernels.tensors import as_rows

# labels, class weight, number of items as a tensor, the same as a number, scale of each token, options as text
PackedRequest = tuple[Tensor, Tensor | None, Tensor | None, float | None, Tensor | None, str]


def pack_request(request: LossRequest) -> PackedRequest:
    """A request as arguments of an operation, which are tensors and plain values."""
    items = request.num_items
    number = None if items is None or isinstance(items, Tensor) else float(items)
    tensor = items if isinstance(items, Tensor) else None
    return request.labels, request.class_weight, tensor, number, request.token_scale, options_as_text(request.options)


def unpack_request(packed: PackedRequest, predictions: Tensor | None = None) -> LossRequest:
    """The inverse of `pack_request`."""
    labels, class_weight, num_items, divisor, token_scale, options = packed
    return LossRequest(
        labels=labels,
        options=options_from_text(options),
        num_items=divisor if num_items is None else num_items,
        class_weight=class_weight,
        predictions=predictions,
        token_scale=token_scale,
    )


def wanted_now(wanted: Sequence[bool], options: LossOptions, token_scale: Tensor | None) -> tuple[bool, ...]:
    """Which gradients this call computes: without reduction there are none before `token_scale` is known."""
    waits = options.reduction == "none" and token_scale is None
    return tuple(want and not waits for want in wanted)


def fill_results(loss: Tensor, grads: Sequence[Tensor | None], late: Tensor | None) -> tuple[Tensor, ...]:
    """An operation's results, with an empty tensor for each one that does not exist."""
    return (loss, *(loss.new_empty(0) if value is None else value for value in (*grads, late)))


def fake_results(sources: Sequence[Tensor | None], *packed: Any) -> tuple[Tensor, ...]:
    """The shapes of an operation's results, for tracing.

    Args:
        packed: the operation's arguments from the labels to `wanted`.
    """
    labels, *_, token_scale, text, dtype, wanted = packed
    options = options_from_text(text)
    reduced = options.reduction != "none"
    first = next(value for value in sources if value is not None)
    loss = first.new_empty(() if reduced else labels.shape, dtype=torch.float32)
    grads = [
        value.new_empty(value.shape) if value is not None and want else None
        for value, want in zip(sources, wanted_now(wanted, options, token_scale), strict=True)
    ]
    late = loss.new_empty(len(sources)) if reduced and waits_for_loss_scale(dtype) else None
    return fill_results(loss, grads, late)


def register_backward(operation: Any, sources: int, *further: Any) -> None:
    """Give an operation with this many sources its backward pass, which may call it again.

    Args:
        further: what that call passes after `wanted`.
    """

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.divisor, _, ctx.options, ctx.dtype, ctx.wanted, *_ = inputs[sources + 3 :]
        ctx.waits = options_from_text(ctx.options).reduction == "none"
        ctx.other_inputs = len(inputs) - sources
        ctx.save_for_backward(*(inputs[: sources + 3] if ctx.waits else output[1 : sources + 2]))
        ctx.mark_non_differentiable(*output[1:])

    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.waits:
            request = (*ctx.saved_tensors, ctx.divisor, grad_loss, ctx.options)
            grads = operation(*request, ctx.dtype, ctx.wanted, *further)[1 : sources + 1]
        else:
            *made, late = ctx.saved_tensors
            grads = [scale(value, grad_loss, late[place : place + 1]) for place, value in enumerate(made)]
        wanted = (grad if want else None for grad, want in zip(grads, ctx.wanted, strict=True))
        return (*wanted, *[None] * ctx.other_inputs)

    operation.register_autograd(backward, setup_context=save)


@torch.library.custom_op("ligerprof::scaled", mutates_args=())
def scale(value: Tensor, factor: Tensor, late: Tensor) -> Tensor:
    """`value * factor`, times `late` unless that is empty. In fp32: torch would round the factor first."""
    return scale_by_device_factor(value, factor, late if late.numel() else None, in_place=False)


@scale.register_fake
def _(value: Tensor, factor: Tensor, late: Tensor) -> Tensor:  # noqa: ARG001
    return torch.empty_like(value)


def compiled_loss(logits: Tensor, request: LossRequest) -> Tensor:
    """The loss, in code that torch.compile traces."""
    wanted = [torch.is_grad_enabled() and logits.requires_grad]
    loss: Tensor
    loss, *_ = _loss(logits, *pack_request(request), logits.dtype, wanted)
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
    dtype: torch.dtype,  # noqa: ARG001 - for fake_results
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, the gradient of the logits, and the factor that it lacks."""
    request = unpack_request((labels, class_weight, num_items, divisor, token_scale, options))
    grad = None
    if all(wanted_now(wanted, request.options, token_scale)):
        grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    loss, late = loss_of_logits(as_rows(logits), None if grad is None else as_rows(grad), request)
    return fill_results(loss, [grad], late)  # type: ignore[return-value]


@_loss.register_fake
def _(logits: Tensor, *packed: Any) -> tuple[Tensor, ...]:
    return fake_results([logits], *packed)


register_backward(_loss, 1)
