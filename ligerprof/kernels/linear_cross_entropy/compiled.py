"""The fused loss as an opaque operation of a compiled graph: no graph break, and the memory of the eager call."""

from typing import Any

import torch
from torch import Tensor

from ligerprof.kernels.cross_entropy.compiled import (
    fake_results,
    fill_results,
    pack_request,
    register_backward,
    unpack_request,
    wanted_now,
)
from ligerprof.kernels.linear_cross_entropy.loss import Inputs, loss_and_gradients
from ligerprof.kernels.options import LossRequest


def compiled_loss(inputs: Inputs, dtype: torch.dtype, request: LossRequest) -> Tensor:
    """The loss, in code that torch.compile traces."""
    track = torch.is_grad_enabled()
    wanted = [track and value is not None and value.requires_grad for value in inputs]
    predict = request.predictions is not None
    loss: Tensor
    loss, *_, predictions = _loss(*inputs, *pack_request(request), dtype, wanted, predict)
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
    dtype: torch.dtype,
    wanted: list[bool],
    predict: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The loss, the gradients of hidden states, weight and bias, the factors that they lack, and the predictions."""
    predictions = torch.empty_like(labels, memory_format=torch.contiguous_format) if predict else None
    request = unpack_request((labels, class_weight, num_items, divisor, token_scale, options), predictions)
    now = wanted_now(wanted, request.options, token_scale)
    loss, grads, late = loss_and_gradients((hidden, weight, bias), dtype, request, now)
    hidden_grad = None if grads.hidden_ND is None else grads.hidden_ND.view(hidden.shape).to(hidden.dtype)
    results = fill_results(loss, (hidden_grad, grads.weight_VD, grads.bias_V), late)
    return (*results, labels.new_empty(0) if predictions is None else predictions)  # type: ignore[return-value]


@_loss.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, *packed: Any) -> tuple[Tensor, ...]:
    *request, predict = packed
    labels = packed[0]
    return (*fake_results((hidden, weight, bias), *request), labels.new_empty(labels.shape if predict else 0))


register_backward(_loss, 3, False)  # noqa: FBT003 - without predictions
