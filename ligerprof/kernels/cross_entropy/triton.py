"""Cross-entropy over given logits in Triton: one pass computes loss and gradient, without synchronization.

Axes: N tokens (rows), V vocabulary. The row kernels also serve the fused linear loss.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ligerprof.errors import KernelInputError
from ligerprof.kernels.cross_entropy.compiled import compiled_loss
from ligerprof.kernels.cross_entropy.factors import scale_by_device_factor
from ligerprof.kernels.cross_entropy.loss import loss_of_logits
from ligerprof.kernels.options import PLAIN_LOSS, LossOptions, LossRequest
from ligerprof.kernels.tensors import (
    as_rows,
    first_order_only,
    graph_is_retained,
    overlaps_itself,
    refuse_dtensors,
)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, request: LossRequest, track: bool) -> Tensor:
        # detached: autograd must not look up the history of a view whose values change
        logits_NV, options = as_rows(logits.detach()), request.options
        ctx.request, ctx.shape = request, logits.shape
        grad_NV = None
        if track and options.reduction != "none":
            in_place = options.in_place and not overlaps_itself(logits_NV)
            grad_NV = logits_NV if in_place else torch.empty_like(logits_NV, memory_format=torch.contiguous_format)
        loss, late = loss_of_logits(logits_NV, grad_NV, request)
        if grad_NV is logits_NV:
            # bump the version counter, so that autograd detects the overwritten logits
            torch.autograd.graph.increment_version(logits)
        ctx.save_for_backward(logits_NV if options.reduction == "none" else grad_NV, late)
        return loss

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        in_place, request = not graph_is_retained(), ctx.request
        saved_NV, late = ctx.saved_tensors
        if request.options.reduction == "none":
            in_place = in_place and request.options.in_place and not overlaps_itself(saved_NV)
            grad_NV = saved_NV if in_place else torch.empty_like(saved_NV, memory_format=torch.contiguous_format)
            loss_of_logits(saved_NV, grad_NV, dataclasses.replace(request, token_scale=grad_loss))
            if in_place:
                # the logits are overwritten only now; they share the counter of the view that was saved
                torch.autograd.graph.increment_version(saved_NV)
        else:
            grad_NV = scale_by_device_factor(saved_NV, grad_loss, late, in_place=in_place)
        return grad_NV.view(ctx.shape), None, None


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    options: LossOptions = PLAIN_LOSS,
    num_items: Tensor | float | None = None,
    class_weight: Tensor | None = None,
) -> Tensor:
    """Cross-entropy of logits [..., V] against int64 labels [...], in fp32.

    If all labels are ignored, the loss and its gradients are zero (torch's mean is NaN then).

    Args:
        num_items: divisor of the reduction `mean`, instead of the number of labels; a tensor stays on its device.
        class_weight: [V], weight of each label's loss; a mean divides by the sum of the labels' weights.

    Raises:
        KernelInputError: the shapes do not match.
    """
    refuse_dtensors("ce", logits, labels, class_weight)
    if labels.shape != logits.shape[:-1]:
        raise KernelInputError(
            f"ce: labels of shape {tuple(labels.shape)} do not match logits of shape {tuple(logits.shape)}."
            " Give one label per row."
        )
    request = LossRequest(labels=labels, options=options, num_items=num_items, class_weight=class_weight)
    if torch.compiler.is_compiling():
        return compiled_loss(logits, request)
    track = torch.is_grad_enabled() and logits.requires_grad
    return _CrossEntropy.apply(logits, request, track)  # type: ignore[no-any-return]
