"""The fused loss as an opaque operation of a compiled graph: no graph break, and the memory of the eager call."""

from typing import Any

import torch
from torch import Tensor

from ligerprof.kernels.cross_entropy.compiled import (
    fake_results,
    fill_results,
    filled_outputs,
    only_gradients,
    pack_request,
    register_backward,
    unpack_request,
)
from ligerprof.kernels.linear_cross_entropy.chunks import Gradients, Inputs, loss_and_gradients, waiting_gradients
from ligerprof.kernels.options import LossOutputs, LossRequest, PackedOptions


def compiled_loss(inputs: Inputs, dtype: torch.dtype, request: LossRequest) -> LossOutputs:
    """The results, in code that torch.compile traces."""
    track = torch.is_grad_enabled()
    wanted = [track and value is not None and value.requires_grad for value in inputs]
    return filled_outputs(_loss(*inputs, *pack_request(request), dtype, wanted), request)


@torch.library.custom_op("ligerprof::fused_linear_cross_entropy", mutates_args=())
def _loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    thin: Tensor | None,
    wide: Tensor | None,
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
    dtype: torch.dtype,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The six results, the gradients of the five inputs, and the factors that they lack."""
    options: PackedOptions = (floats, integers, text)
    incoming = (grad_loss, grad_lse, grad_entropy)
    request, gradients = unpack_request((labels, class_weight, num_items, divisor, *incoming, *options, returns))
    inputs = (hidden, weight, bias, thin, wide)
    if gradients is not None:
        grads = waiting_gradients(inputs, dtype, request, gradients, tuple(wanted))
        return only_gradients(hidden, _of_inputs(grads, hidden, thin))  # type: ignore[return-value]
    outputs, grads, late = loss_and_gradients(inputs, dtype, request, tuple(wanted))
    return fill_results(outputs, _of_inputs(grads, hidden, thin), late)  # type: ignore[return-value]


def _of_inputs(grads: Gradients, hidden: Tensor, thin: Tensor | None) -> tuple[Tensor | None, ...]:
    hidden_grad, thin_grad = (
        None if grad is None or value is None else grad.view(value.shape).to(value.dtype)
        for grad, value in ((grads.hidden_ND, hidden), (grads.thin_NR, thin))
    )
    return hidden_grad, grads.weight_VD, grads.bias_V, thin_grad, grads.wide_VR


@_loss.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, thin: Tensor | None, wide: Tensor | None, *packed: Any
) -> tuple[Tensor, ...]:
    return fake_results((hidden, weight, bias, thin, wide), *packed)


register_backward(_loss, 5)
