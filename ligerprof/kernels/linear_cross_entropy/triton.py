"""Linear layer and cross-entropy fused: logits of a few tokens at a time, overwritten by their own gradient.

Gradients are computed in forward, while the logits exist, unless each token has factors that only backward knows.

Axes: D hidden, V vocabulary.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ligerprof.errors import KernelInputError
from ligerprof.kernels.cross_entropy.compiled import (
    fake_results,
    fill_results,
    filled_outputs,
    only_gradients,
    pack_request,
    register_backward,
    unpack_request,
)
from ligerprof.kernels.cross_entropy.factors import scale_by_device_factor
from ligerprof.kernels.cross_entropy.loss import check_label_dtype
from ligerprof.kernels.cross_entropy.triton import check_predictions, mark_outputs
from ligerprof.kernels.linear_cross_entropy.chunks import (
    Gradients,
    Inputs,
    like,
    loss_and_gradients,
    waiting_gradients,
)
from ligerprof.kernels.options import (
    PLAIN_LOSS,
    IncomingGradients,
    LossOptions,
    LossOutputs,
    LossRequest,
    PackedOptions,
    VocabularyShard,
    checked_returns,
)
from ligerprof.kernels.tensors import check_tensors, first_order_only, graph_is_retained, product_dtype


class _FusedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        thin: Tensor | None,
        wide: Tensor | None,
        dtype: torch.dtype,
        request: LossRequest,
        track: bool,
    ) -> tuple[Tensor | None, ...]:
        inputs = (hidden, weight, bias, thin, wide)
        wanted = tuple(track and needed for needed in ctx.needs_input_grad[: len(inputs)])
        outputs, grads, late = loss_and_gradients(inputs, dtype, request, wanted)
        ctx.dtype, ctx.request = dtype, dataclasses.replace(request, predictions=None)
        ctx.per_token = like(hidden), like(thin)
        if request.waits:
            ctx.save_for_backward(*inputs)
        else:
            ctx.save_for_backward(*grads.in_order, late)
        return mark_outputs(ctx, outputs)

    @staticmethod
    @first_order_only
    def backward(
        ctx: Any, grad_loss: Tensor | None, grad_lse: Tensor | None, grad_entropy: Tensor | None, *_: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if ctx.request.waits:
            # each token has its own factors, which must be known before the sum over tokens
            incoming = IncomingGradients(loss=grad_loss, lse=grad_lse, entropy=grad_entropy)
            grads = waiting_gradients(ctx.saved_tensors, ctx.dtype, ctx.request, incoming, ctx.needs_input_grad[:5])
        else:
            assert grad_loss is not None
            grads = scaled_gradients(ctx, grad_loss)
        return *grads.shaped(*ctx.per_token), None, None, None


def scaled_gradients(ctx: Any, grad_loss: Tensor) -> Gradients:
    """The gradients that forward saved, and their factor, times that of the loss."""
    *made, late = ctx.saved_tensors
    factors = [None] * len(made) if late is None else late.split(1)
    in_place = not graph_is_retained()
    hidden_ND, weight_VD, bias_V, thin_NR, wide_VR = (
        None if grad is None else scale_by_device_factor(grad, grad_loss, factor, in_place=in_place)
        for grad, factor in zip(made, factors, strict=True)
    )
    return Gradients(hidden_ND, weight_VD, bias_V, thin_NR, wide_VR)


def compiled_loss(inputs: Inputs, dtype: torch.dtype, request: LossRequest) -> LossOutputs:
    """The results as one opaque operation of a compiled graph: no graph break, and the memory of the eager call."""
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
    inputs, of_tokens = (hidden, weight, bias, thin, wide), ((hidden.shape, hidden.dtype), like(thin))
    if gradients is not None:
        grads = waiting_gradients(inputs, dtype, request, gradients, tuple(wanted))
        return only_gradients(hidden, grads.shaped(*of_tokens))  # type: ignore[return-value]
    outputs, grads, late = loss_and_gradients(inputs, dtype, request, tuple(wanted))
    return fill_results(outputs, grads.shaped(*of_tokens), late)  # type: ignore[return-value]


@_loss.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, thin: Tensor | None, wide: Tensor | None, *packed: Any
) -> tuple[Tensor, ...]:
    return fake_results((hidden, weight, bias, thin, wide), *packed)


register_backward(_loss, 5)


def fused_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    options: LossOptions = PLAIN_LOSS,
    bias: Tensor | None = None,
    num_items: Tensor | float | None = None,
    class_weight: Tensor | None = None,
    predictions: Tensor | None = None,
    *,
    shard: VocabularyShard | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Cross-entropy of `hidden @ weight.T + bias` against labels, in fp32, without ever holding all logits.

    Under autocast the products run in its dtype, and the weight's gradient is summed in the weight's dtype.
    If all labels are ignored, the loss and its gradients are zero (torch's mean is NaN then).

    Args:
        hidden: [..., D].
        weight: [V, D].
        labels: [...], int64.
        num_items: divisor of the reduction `mean`, instead of the number of labels; a tensor stays on its device.
        class_weight: [V], weight of each label's loss; a mean divides by the sum of the labels' weights.
        predictions: int64, contiguous, shaped like the labels: receives each position's most likely word, -1 if its
            label is ignored.
        shard: the words that weight and bias are, if the vocabulary is split over ranks.
        low_rank: factors [..., R] and [V, R] whose product is added to the logits, such as those of LoRA. A trainable
            weight next to them does without the scratch in its gradient's memory.

    Raises:
        KernelInputError: the shapes do not match, or a label that is checked is outside the vocabulary.
    """
    return fused_linear_cross_entropy_outputs(
        hidden,
        weight,
        labels,
        options,
        bias,
        num_items,
        class_weight,
        predictions,
        returns=(),
        shard=shard,
        low_rank=low_rank,
    ).loss


def fused_linear_cross_entropy_outputs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    options: LossOptions = PLAIN_LOSS,
    bias: Tensor | None = None,
    num_items: Tensor | float | None = None,
    class_weight: Tensor | None = None,
    predictions: Tensor | None = None,
    *,
    returns: Iterable[str],
    shard: VocabularyShard | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
) -> LossOutputs:
    """`fused_linear_cross_entropy` with further results: the names in `returns`, which `LossOutputs` describes.

    Results with a gradient (lse, entropy) move all gradients to backward, which computes the logits again.

    Raises:
        KernelInputError: see `fused_linear_cross_entropy`; or a name in `returns` is unknown.
    """
    thin, wide = (None, None) if low_rank is None else low_rank
    check_head("flce", hidden, weight, labels, bias, low_rank, elsewhere=(class_weight,))
    check_predictions("flce", predictions, labels)
    dtype = product_dtype(hidden)
    request = LossRequest(
        labels=labels,
        options=options,
        num_items=num_items,
        class_weight=class_weight,
        predictions=predictions,
        returns=checked_returns(returns),
        shard=shard,
    )
    if torch.compiler.is_compiling():
        return compiled_loss((hidden, weight, bias, thin, wide), dtype, request)
    inputs = (hidden, weight, bias, thin, wide)
    track = torch.is_grad_enabled() and any(value is not None and value.requires_grad for value in inputs)
    return LossOutputs(*_FusedLinearCrossEntropy.apply(*inputs, dtype, request, track))


def check_head(
    kernel: str,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    low_rank: tuple[Tensor, Tensor] | None = None,
    *,
    elsewhere: tuple[Tensor | None, ...] = (),
) -> None:
    """Raise an error unless these are hidden states [..., D], a head [V, D], labels [...], a bias [V], and factors.

    Raises:
        KernelInputError: see above; or see `check_tensors`, which `elsewhere` is of.
    """
    check_tensors(kernel, hidden, weight, bias, *(low_rank or ()), elsewhere=(labels, *elsewhere))
    check_label_dtype(kernel, labels)
    if weight.ndim != 2 or labels.shape != hidden.shape[:-1] or hidden.shape[-1] != weight.shape[1]:
        raise KernelInputError(
            f"{kernel}: hidden states {tuple(hidden.shape)}, a head of {tuple(weight.shape)} and labels"
            f" {tuple(labels.shape)} do not match. Give a head [V, D] and one label"
            " for each hidden state of D elements."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise KernelInputError(
            f"{kernel}: a bias of shape {tuple(bias.shape)} does not match a head of {tuple(weight.shape)}."
            " Give one element per word."
        )
    if low_rank is None:
        return
    thin, wide = low_rank
    if thin.shape[:-1] != hidden.shape[:-1] or wide.shape != (weight.shape[0], thin.shape[-1]):
        raise KernelInputError(
            f"{kernel}: low-rank factors {tuple(thin.shape)} and {tuple(wide.shape)} do not match hidden states"
            f" {tuple(hidden.shape)} and a head of {tuple(weight.shape)}. Give [..., R] and [V, R]."
        )
