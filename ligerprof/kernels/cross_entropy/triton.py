"""Cross-entropy over given logits in Triton: one pass computes loss and gradient, without synchronization.

Axes: N tokens (rows), V vocabulary. The row kernels also serve the fused linear loss.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ligerprof.errors import KernelInputError
from ligerprof.kernels.cross_entropy.compiled import compiled_loss
from ligerprof.kernels.cross_entropy.factors import scale_by_device_factor
from ligerprof.kernels.cross_entropy.loss import check_label_shape, loss_of_logits, waiting_gradient_of_logits
from ligerprof.kernels.options import (
    PLAIN_LOSS,
    IncomingGradients,
    LossOptions,
    LossOutputs,
    LossRequest,
    VocabularyShard,
    checked_returns,
)
from ligerprof.kernels.tensors import (
    as_rows,
    check_tensors,
    first_order_only,
    graph_is_retained,
    overlaps_itself,
)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, request: LossRequest, track: bool) -> tuple[Tensor | None, ...]:
        # detached: autograd must not look up the history of a view whose values change
        logits_NV = as_rows(logits.detach())
        ctx.request, ctx.shape = dataclasses.replace(request, predictions=None), logits.shape
        grad_NV = None
        if track and not request.waits:
            in_place = request.options.in_place and not overlaps_itself(logits_NV)
            grad_NV = logits_NV if in_place else torch.empty_like(logits_NV, memory_format=torch.contiguous_format)
        outputs, late = loss_of_logits(logits_NV, grad_NV, request)
        if grad_NV is logits_NV:
            # bump the version counter, so that autograd detects the overwritten logits
            torch.autograd.graph.increment_version(logits)
        ctx.save_for_backward(logits_NV if request.waits else grad_NV, late)
        return mark_outputs(ctx, outputs)

    @staticmethod
    @first_order_only
    def backward(
        ctx: Any, grad_loss: Tensor | None, grad_lse: Tensor | None, grad_entropy: Tensor | None, *_: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        in_place, request = not graph_is_retained(), ctx.request
        saved_NV, late = ctx.saved_tensors
        if request.waits:
            in_place = in_place and request.options.in_place and not overlaps_itself(saved_NV)
            grad_NV = saved_NV if in_place else torch.empty_like(saved_NV, memory_format=torch.contiguous_format)
            incoming = IncomingGradients(loss=grad_loss, lse=grad_lse, entropy=grad_entropy)
            waiting_gradient_of_logits(saved_NV, grad_NV, request, incoming)
            if in_place:
                # the logits are overwritten only now; they share the counter of the view that was saved
                torch.autograd.graph.increment_version(saved_NV)
        else:
            assert grad_loss is not None
            grad_NV = scale_by_device_factor(saved_NV, grad_loss, late, in_place=in_place)
        return grad_NV.view(ctx.shape), None, None


def mark_outputs(ctx: Any, outputs: LossOutputs) -> tuple[Tensor | None, ...]:
    """A loss's results as its autograd function returns them: loss, log-sum-exp and entropy have a gradient."""
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*(value for value in outputs[3:] if value is not None))
    return tuple(outputs)


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    options: LossOptions = PLAIN_LOSS,
    num_items: Tensor | float | None = None,
    class_weight: Tensor | None = None,
    predictions: Tensor | None = None,
    *,
    shard: VocabularyShard | None = None,
) -> Tensor:
    """Cross-entropy of logits [..., V] against int64 labels [...], in fp32.

    If all labels are ignored, the loss and its gradients are zero (torch's mean is NaN then).

    Args:
        num_items: divisor of the reduction `mean`, instead of the number of labels; a tensor stays on its device.
        class_weight: [V], weight of each label's loss; a mean divides by the sum of the labels' weights.
        predictions: int64, contiguous, shaped like the labels: receives each position's most likely word, -1 if its
            label is ignored.
        shard: the words that these logits are, if the vocabulary is split over ranks.

    Raises:
        KernelInputError: the shapes do not match, or a label that is checked is outside the vocabulary.
    """
    return cross_entropy_outputs(
        logits, labels, options, num_items, class_weight, predictions, returns=(), shard=shard
    ).loss


def cross_entropy_outputs(
    logits: Tensor,
    labels: Tensor,
    options: LossOptions = PLAIN_LOSS,
    num_items: Tensor | float | None = None,
    class_weight: Tensor | None = None,
    predictions: Tensor | None = None,
    *,
    returns: Iterable[str],
    shard: VocabularyShard | None = None,
) -> LossOutputs:
    """`cross_entropy` with further results: the names in `returns`, which `LossOutputs` describes.

    Results with a gradient (lse, entropy) move the gradient of the logits to backward, which reads them again.

    Raises:
        KernelInputError: see `cross_entropy`; or a name in `returns` is unknown.
    """
    check_tensors("ce", logits, elsewhere=(labels, class_weight))
    check_label_shape(logits, labels)
    check_predictions("ce", predictions, labels)
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
        return compiled_loss(logits, request)
    track = torch.is_grad_enabled() and logits.requires_grad
    return LossOutputs(*_CrossEntropy.apply(logits, request, track))


def check_predictions(kernel: str, predictions: Tensor | None, labels: Tensor) -> None:
    """Raise an error for a tensor that cannot receive the predictions.

    Raises:
        KernelInputError: see above.
    """
    if predictions is None:
        return
    fits = (predictions.dtype, predictions.shape) == (torch.int64, labels.shape)
    if not (fits and predictions.is_contiguous()):
        raise KernelInputError(
            f"{kernel}: predictions are a {predictions.dtype} tensor of {tuple(predictions.shape)}. They need int64,"
            f" the labels' shape {tuple(labels.shape)}, and no gaps: torch.empty_like(labels)."
        )
