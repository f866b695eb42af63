"""Losses as opaque operations of a compiled graph: no graph break, and each gradient in a tensor of its own.

An operation takes its sources (tensors that may want a gradient), the values of `pack_request`, the logits' dtype and
`wanted` (which sources want a gradient). It returns the six results of `LossOutputs`, a gradient per source, and the
factors that the gradients still lack, one per source. An empty tensor replaces each result that does not exist.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ligerprof.errors import KernelUnavailableError
from ligerprof.kernels.cross_entropy.factors import scale_by_device_factor, waits_for_loss_scale
from ligerprof.kernels.cross_entropy.loss import loss_of_logits, waiting_gradient_of_logits
from ligerprof.kernels.options import (
    IncomingGradients,
    LossOutputs,
    LossRequest,
    PackedOptions,
    pack_options,
    unpack_options,
)
from ligerprof.kernels.tensors import as_rows

# labels, class weight, number of items as a tensor, the same as a number, gradients of loss, log-sum-exp and entropy,
# options, names of further results joined by commas
PackedRequest = tuple[
    Tensor,
    Tensor | None,
    Tensor | None,
    float | None,
    Tensor | None,
    Tensor | None,
    Tensor | None,
    list[float],
    list[int],
    str,
    str,
]
_TENSORS, _GRADIENTS = 3, slice(4, 7)


def pack_request(request: LossRequest) -> PackedRequest:
    """A request as arguments of an operation, which are tensors and plain values.

    Raises:
        KernelUnavailableError: the vocabulary is split over ranks.
    """
    if request.shard is not None:
        raise KernelUnavailableError(
            "a loss over a shard of the vocabulary cannot be compiled. Call it outside of torch.compile."
        )
    items = request.num_items
    number = None if items is None or isinstance(items, Tensor) else float(items)
    tensor = items if isinstance(items, Tensor) else None
    returns = list(request.returns)
    if request.predictions is not None and "predicted_tokens" not in returns:
        returns.append("predicted_tokens")
    options = pack_options(request.options)
    return request.labels, request.class_weight, tensor, number, None, None, None, *options, ",".join(returns)


def unpack_request(packed: PackedRequest) -> tuple[LossRequest, IncomingGradients | None]:
    """The inverse of `pack_request`, and the gradients of the results if this call computes the waiting gradients."""
    labels, class_weight, num_items, divisor, *incoming, floats, integers, text, returns = packed
    request = LossRequest(
        labels=labels,
        options=unpack_options((floats, integers, text)),
        num_items=divisor if num_items is None else num_items,
        class_weight=class_weight,
        returns=tuple(returns.split(",")) if returns else (),
    )
    if all(value is None for value in incoming):
        return request, None
    loss, lse, entropy = incoming
    return request, IncomingGradients(loss=loss, lse=lse, entropy=entropy)


def fill_results(outputs: LossOutputs, grads: Sequence[Tensor | None], late: Tensor | None) -> tuple[Tensor, ...]:
    """An operation's results, with an empty tensor for each one that does not exist."""
    loss, *others, predicted = outputs
    filled = [loss.new_empty(0) if value is None else value for value in (*others, *grads, late)]
    integers = loss.new_empty(0, dtype=torch.int64) if predicted is None else predicted
    return (loss, *filled[: len(others)], integers, *filled[len(others) :])


def only_gradients(like: Tensor, grads: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """The results of a call that computes waiting gradients."""
    return fill_results(LossOutputs(like.new_empty(0, dtype=torch.float32)), grads, None)


def filled_outputs(results: Sequence[Tensor], request: LossRequest) -> LossOutputs:
    """The results that the request asks for, from an operation's results."""
    loss, *others = results[: len(LossOutputs._fields)]
    named = dict(zip(LossOutputs._fields[1:], others, strict=True))
    if request.predictions is not None:
        request.predictions.copy_(named["predicted_tokens"])
    return LossOutputs(loss, **{name: value for name, value in named.items() if name in request.returns})


def fake_results(sources: Sequence[Tensor | None], *packed: Any) -> tuple[Tensor, ...]:
    """The shapes of an operation's results, for tracing.

    Args:
        packed: the operation's arguments from the labels to `wanted`.
    """
    *packed_request, dtype, wanted = packed
    request, incoming = unpack_request(packed_request)  # type: ignore[arg-type]
    first = next(value for value in sources if value is not None)
    makes = not request.waits or incoming is not None
    grads = [
        value.new_empty(value.shape) if value is not None and want and makes else None
        for value, want in zip(sources, wanted, strict=True)
    ]
    if incoming is not None:
        return only_gradients(first, grads)
    reduced = request.options.reduction != "none"
    shapes = dict.fromkeys(LossOutputs._fields, request.labels.shape)
    if reduced:
        shapes |= dict.fromkeys(("loss", "z_loss", "token_accuracy"), torch.Size())
    made = {
        name: first.new_empty(shapes[name], dtype=torch.int64 if name == "predicted_tokens" else torch.float32)
        for name in ("loss", *request.returns)
    }
    late = first.new_empty(len(sources), dtype=torch.float32) if reduced and waits_for_loss_scale(dtype) else None
    return fill_results(LossOutputs(**made), grads, late)


def register_backward(operation: Any, sources: int) -> None:
    """Give an operation with this many sources its backward pass, which calls it again if gradients wait."""
    outputs = len(LossOutputs._fields)

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        packed, (ctx.dtype, ctx.wanted) = inputs[sources:-2], inputs[-2:]
        request, _ = unpack_request(packed)
        ctx.waits, ctx.packed, ctx.other_inputs = request.waits, packed[_TENSORS:], len(inputs) - sources
        ctx.save_for_backward(*(inputs[: sources + _TENSORS] if ctx.waits else output[outputs:]))
        ctx.mark_non_differentiable(*output[3:], *(value for value in output[1:3] if value.numel() == 0))
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.waits:
            given = list(ctx.packed)
            given[_GRADIENTS.start - _TENSORS : _GRADIENTS.stop - _TENSORS] = incoming[:3]
            grads = operation(*ctx.saved_tensors, *given, ctx.dtype, ctx.wanted)[outputs : outputs + sources]
        else:
            *made, late = ctx.saved_tensors
            grads = [scale(value, incoming[0], late[place : place + 1]) for place, value in enumerate(made)]
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


def compiled_loss(logits: Tensor, request: LossRequest) -> LossOutputs:
    """The results, in code that torch.compile traces."""
    wanted = [torch.is_grad_enabled() and logits.requires_grad]
    return filled_outputs(_loss(logits, *pack_request(request), logits.dtype, wanted), request)


@torch.library.custom_op("ligerprof::cross_entropy", mutates_args=())
def _loss(
    logits: Tensor,
    labels: Tensor,
    class_weight: Tensor | None,
    num_items: Tensor | None,
    divisor: float | None,
    grad_loss: Tensor | None,
    grad_lse: Tensor | None,
    grad_entropy: Tensor | None,
    floats: list[float],
    integers: list[int],
    text: str,
    returns: str,
    dtype: torch.dtype,  # noqa: ARG001 - for fake_results
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The six results, the gradient of the logits, and the factor that it lacks."""
    options: PackedOptions = (floats, integers, text)
    incoming = (grad_loss, grad_lse, grad_entropy)
    request, gradients = unpack_request((labels, class_weight, num_items, divisor, *incoming, *options, returns))
    logits_NV, grad = as_rows(logits), None
    if wanted[0] and (not request.waits or gradients is not None):
        grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    grad_NV = None if grad is None else as_rows(grad)
    if gradients is not None:
        assert grad_NV is not None
        waiting_gradient_of_logits(logits_NV, grad_NV, request, gradients)
        return only_gradients(logits, [grad])  # type: ignore[return-value]
    outputs, late = loss_of_logits(logits_NV, grad_NV, request)
    return fill_results(outputs, [grad], late)  # type: ignore[return-value]


@_loss.register_fake
def _(logits: Tensor, *packed: Any) -> tuple[Tensor, ...]:
    return fake_results([logits], *packed)


register_backward(_loss, 1)
