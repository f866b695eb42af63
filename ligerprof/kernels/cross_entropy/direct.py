"""Cross-entropy without autograd: loss, log-sum-exp and gradient of given logits from one launch.

For autograd functions of your own. In a compiled graph, a call is one opaque operation. Axes: N tokens (rows),
V vocabulary.
"""

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from ligerprof.errors import KernelInputError
from ligerprof.kernels.cross_entropy.factors import scale_by_device_factor
from ligerprof.kernels.cross_entropy.loss import check_label_shape, loss_of_logits, waiting_gradient_of_logits
from ligerprof.kernels.options import (
    PLAIN_LOSS,
    IncomingGradients,
    LossOptions,
    LossRequest,
    pack_options,
    unpack_options,
)
from ligerprof.kernels.tensors import as_rows, check_tensors, dense_like, rows_can_be_overwritten


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
    gradient = _memory_for_gradient(logits, labels, options)
    loss, lse = _fill(gradient, logits, labels, options, class_weight, None)
    return LossAndGradient(loss, lse, gradient)


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
    gradient = _memory_for_gradient(logits, labels, options)
    _fill(gradient, logits, labels, options, class_weight, grad_loss)
    return gradient


def _memory_for_gradient(logits: Tensor, labels: Tensor, options: LossOptions) -> Tensor:
    """The logits themselves if their gradient overwrites them, otherwise memory shaped like them.

    Raises:
        KernelInputError: the shapes do not match.
    """
    check_tensors("ce", logits, elsewhere=(labels,))
    check_label_shape(logits, labels)
    return logits if options.in_place and rows_can_be_overwritten(logits) else dense_like(logits)


def _fill(
    gradient: Tensor,
    logits: Tensor,
    labels: Tensor,
    options: LossOptions,
    class_weight: Tensor | None,
    grad_loss: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Write the gradient, which may be the logits; see `_write_gradient` for the results."""
    source = None if gradient is logits else logits.detach()
    with torch.no_grad():
        if torch.compiler.is_compiling():
            # the addresses of tensors, which decide how rows are read, are unknown until the graph runs
            packed = pack_options(options)
            loss, lse = _operation(gradient.detach(), source, labels, class_weight, grad_loss, *packed)
            return loss, lse
        if source is None:
            torch.autograd.graph.increment_version(logits)
        return _write_gradient(gradient.detach(), source, labels, options, class_weight, grad_loss)


def _write_gradient(
    gradient: Tensor,
    logits: Tensor | None,
    labels: Tensor,
    options: LossOptions,
    class_weight: Tensor | None,
    grad_loss: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Write the gradient of the loss, or that of one loss per token from the gradients of these losses.

    Args:
        gradient: receives it; has rows in its own memory.
        logits: None: they are in `gradient`.

    Returns:
        The loss and the log-sum-exps; without elements if the gradients of the losses are given.
    """
    grad_NV = as_rows(gradient)
    logits_NV = grad_NV if logits is None else as_rows(logits)
    if grad_loss is not None:
        options = dataclasses.replace(options, reduction="none")
        request = LossRequest(labels=labels, options=options, class_weight=class_weight)
        waiting_gradient_of_logits(logits_NV, grad_NV, request, IncomingGradients(loss=grad_loss.detach()))
        return _no_results(gradient)
    request = LossRequest(labels=labels, options=options, class_weight=class_weight, returns=("lse",))
    outputs, late = loss_of_logits(logits_NV, grad_NV, request)
    if late is not None:
        scale_by_device_factor(grad_NV, late, None, in_place=True)
    assert outputs.lse is not None
    return outputs.loss, outputs.lse


def _no_results(like: Tensor) -> tuple[Tensor, Tensor]:
    return like.new_empty(0, dtype=torch.float32), like.new_empty(0, dtype=torch.float32)


@torch.library.custom_op("ligerprof::cross_entropy_and_gradient", mutates_args=("gradient",))
def _operation(
    gradient: Tensor,
    logits: Tensor | None,
    labels: Tensor,
    class_weight: Tensor | None,
    grad_loss: Tensor | None,
    floats: list[float],
    integers: list[int],
    text: str,
) -> tuple[Tensor, Tensor]:
    """`_write_gradient`, with the values of `pack_options`."""
    return _write_gradient(gradient, logits, labels, unpack_options((floats, integers, text)), class_weight, grad_loss)


@_operation.register_fake
def _(
    gradient: Tensor,
    logits: Tensor | None,  # noqa: ARG001
    labels: Tensor,
    class_weight: Tensor | None,  # noqa: ARG001
    grad_loss: Tensor | None,
    floats: list[float],
    integers: list[int],
    text: str,
) -> tuple[Tensor, Tensor]:
    if grad_loss is not None:
        return _no_results(gradient)
    shape = labels.shape if unpack_options((floats, integers, text)).reduction == "none" else ()
    return gradient.new_empty(shape, dtype=torch.float32), gradient.new_empty(labels.shape, dtype=torch.float32)
