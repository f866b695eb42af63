"""Cross-entropy without autograd: loss, log-sum-exp and gradient of given logits from one launch.

For autograd functions of your own. Axes: N tokens (rows), V vocabulary.
"""

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from ligerprof.errors import KernelInputError
from ligerprof.kernels.cross_entropy.loss import check_label_shape, loss_of_logits, waiting_gradient_of_logits
from ligerprof.kernels.options import PLAIN_LOSS, IncomingGradients, LossOptions, LossRequest
from ligerprof.kernels.tensors import as_rows, check_tensors, overlaps_itself


class LossAndGradient(NamedTuple):
    """Results of one launch.

    Attributes:
        loss: fp32; one element, or one per token without reduction.
        lse: log-sum-exp of each token's logits as the loss sees them, fp32; 0 if the label is ignored.
        gradient: of the logits, in their dtype: of the loss, or of the sum of the losses without reduction. The logits
            themselves if it overwrote them.
    """

    loss: Tensor
    lse: Tensor
    gradient: Tensor


def cross_entropy_and_gradient(
    logits: Tensor, labels: Tensor, options: LossOptions = PLAIN_LOSS, class_weight: Tensor | None = None
) -> LossAndGradient:
    """Loss of logits [..., V] against int64 labels [...], and its gradient; nothing is recorded for autograd.

    With the option `in_place`, the gradient overwrites the logits.

    Raises:
        KernelInputError: the shapes do not match, or a label that is checked is outside the vocabulary.
    """
    logits_NV, grad_NV, gradient = _buffers(logits, labels, options)
    request = LossRequest(labels=labels, options=options, class_weight=class_weight, returns=("lse",))
    with torch.no_grad():
        outputs, late = loss_of_logits(logits_NV, grad_NV, request)
        if late is not None:
            grad_NV.mul_(late.to(grad_NV.dtype))
    assert outputs.lse is not None
    return LossAndGradient(outputs.loss, outputs.lse, gradient)


def cross_entropy_gradient(
    logits: Tensor,
    labels: Tensor,
    grad_loss: Tensor,
    options: LossOptions = PLAIN_LOSS,
    class_weight: Tensor | None = None,
) -> Tensor:
    """Gradient of the logits of one loss per token, from the gradients [...] of these losses.

    With the option `in_place`, it overwrites the logits, and the result is the logits themselves.

    Raises:
        KernelInputError: the shapes do not match.
    """
    if grad_loss.shape != labels.shape:
        raise KernelInputError(
            f"ce: gradients of shape {tuple(grad_loss.shape)} do not match labels of shape {tuple(labels.shape)}."
            " Give one gradient per label."
        )
    logits_NV, grad_NV, gradient = _buffers(logits, labels, options)
    options = dataclasses.replace(options, reduction="none")
    request = LossRequest(labels=labels, options=options, class_weight=class_weight)
    with torch.no_grad():
        waiting_gradient_of_logits(logits_NV, grad_NV, request, IncomingGradients(loss=grad_loss.detach()))
    return gradient


def _buffers(logits: Tensor, labels: Tensor, options: LossOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Logits as rows, memory for the gradient of these rows, and the same memory shaped as the logits.

    Raises:
        KernelInputError: the shapes do not match.
    """
    check_tensors("ce", logits, elsewhere=(labels,))
    check_label_shape(logits, labels)
    logits_NV = as_rows(logits.detach())
    if options.in_place and not overlaps_itself(logits) and logits_NV.data_ptr() == logits.data_ptr():
        torch.autograd.graph.increment_version(logits)
        return logits_NV, logits_NV, logits
    grad_NV = torch.empty_like(logits_NV, memory_format=torch.contiguous_format)
    return logits_NV, grad_NV, grad_NV.view(logits.shape)
