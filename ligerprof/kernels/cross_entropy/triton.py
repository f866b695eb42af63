"""Cross-entropy over given logits in Triton: one pass that makes loss and gradient, nothing read back by the host.

N tokens (rows), V vocabulary. The same row kernel serves the fused linear loss.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ligerprof.errors import KernelInputError
from ligerprof.kernels.cross_entropy.factors import (
    loss_divisor,
    reduce_losses,
    scale_by_device_factor,
    waits_for_loss_scale,
)
from ligerprof.kernels.cross_entropy.rows import LossCall, loss_and_gradient
from ligerprof.kernels.options import PLAIN_LOSS, LossOptions


def graph_is_kept() -> bool:
    """Whether the backward that runs now may run again (`retain_graph=True`)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


@dataclass(frozen=True, kw_only=True, slots=True)
class LossRequest:
    """What a call of either loss has no gradient for.

    Attributes:
        num_items: what the summed loss is divided by instead of the count, where the reduction is `mean`.
        class_weight: [V], or None.
        predictions: of the labels' shape, is filled; or None.
        token_scale: factor on each token's gradient, known in backward where nothing is reduced; or None.
    """

    labels: Tensor
    options: LossOptions
    num_items: Tensor | float | None = None
    class_weight: Tensor | None = None
    predictions: Tensor | None = None
    token_scale: Tensor | None = None


# launches the row kernel for all tokens
Launch = Callable[[LossCall], None]


def compute_loss(request: LossRequest, vocab: int, launch: Launch, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """The loss, and the factor in it; where `waits_for_loss_scale`, gradients still lack that factor.

    Args:
        launch: fills losses and gradients.
        like: of the device and the dtype of the logits.

    Raises:
        KernelInputError: not one class weight a word.
    """
    options = request.options
    loss_N = torch.empty(request.labels.numel(), dtype=torch.float32, device=like.device)
    call = dataclasses.replace(_make_call(request, vocab, like.device), loss_N=loss_N)
    if options.reduction == "none":
        scale = None if request.token_scale is None else request.token_scale.reshape(-1).contiguous()
        launch(dataclasses.replace(call, scale=scale))
        return loss_N.view(request.labels.shape), None
    factor = loss_divisor(call, request.num_items)
    total = torch.empty((), dtype=torch.float32, device=like.device)
    launch(dataclasses.replace(call, scale=None if waits_for_loss_scale(like.dtype) else factor))
    reduce_losses(loss_N, factor, total)
    return total, factor


def _make_call(request: LossRequest, vocab: int, device: torch.device) -> LossCall:
    """Labels in one row on the device, and what each word weighs."""
    weight, total = request.class_weight, None
    if weight is not None:
        if weight.shape != (vocab,):
            raise KernelInputError(
                f"class weights of shape {tuple(weight.shape)} do not go with a vocabulary of {vocab}."
                " One weight a word is needed."
            )
        weight = weight.detach().to(device).contiguous()
        total = weight.sum() if request.options.label_smoothing > 0 else None
    return LossCall(
        labels_N=request.labels.to(device).reshape(-1).contiguous(),
        seq_len=request.labels.shape[-1],
        vocab=vocab,
        options=request.options,
        class_weight_V=weight,
        class_weight_sum=total,
        prediction_N=request.predictions,
    )


def loss_of_logits(logits_NV: Tensor, grad_NV: Tensor | None, request: LossRequest) -> tuple[Tensor, Tensor | None]:
    """As `compute_loss`, the logits' gradient written to `grad_NV`."""
    return compute_loss(
        request, logits_NV.shape[1], lambda call: loss_and_gradient(call, logits_NV, grad_NV), logits_NV
    )


def as_rows(logits: Tensor) -> Tensor:
    """Logits as [N, V] with dense rows, where they are if they can be."""
    # detached: autograd must not look for the history of a view whose bytes change
    logits_NV = logits.detach().reshape(-1, logits.shape[-1])
    return logits_NV if logits_NV.stride(-1) == 1 else logits_NV.contiguous()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, request: LossRequest, track: bool) -> Tensor:
        logits_NV, options = as_rows(logits), request.options
        ctx.request, ctx.shape = request, logits.shape
        grad_NV = None
        if track and options.reduction != "none":
            grad_NV = logits_NV if options.in_place else torch.empty_like(logits_NV)
        loss, factor = loss_of_logits(logits_NV, grad_NV, request)
        if grad_NV is logits_NV:
            # whoever saved the logits for backward learns that they are gone
            torch.autograd.graph.increment_version(logits)
        ctx.save_for_backward(logits_NV if options.reduction == "none" else grad_NV, factor)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        in_place, request = not graph_is_kept(), ctx.request
        kept_NV, factor = ctx.saved_tensors
        if request.options.reduction == "none":
            grad = kept_NV if in_place and request.options.in_place else torch.empty_like(kept_NV)
            loss_of_logits(kept_NV, grad, dataclasses.replace(request, token_scale=grad_loss))
        else:
            late = factor if waits_for_loss_scale(kept_NV.dtype) else None
            grad = scale_by_device_factor(kept_NV, grad_loss, late, in_place=in_place)
        return grad.view(ctx.shape), None, None


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    options: LossOptions = PLAIN_LOSS,
    num_items: Tensor | float | None = None,
    class_weight: Tensor | None = None,
) -> Tensor:
    """Cross-entropy of logits [..., V] against labels [...], in fp32.

    Where no label counts, the loss and its gradients are zero (torch's mean is NaN there).

    Args:
        num_items: what the summed loss is divided by instead of the count, where the reduction is `mean`;
            a tensor stays on its device.
        class_weight: [V], what a label's loss is multiplied by; a mean divides by the weights of the labels.

    Raises:
        KernelInputError: shapes that do not go together.
    """
    if labels.shape != logits.shape[:-1]:
        raise KernelInputError(
            f"ce: labels {tuple(labels.shape)} do not go with logits {tuple(logits.shape)}. One label a row is needed."
        )
    request = LossRequest(labels=labels, options=options, num_items=num_items, class_weight=class_weight)
    if torch.compiler.is_compiling():
        from ligerprof.kernels.cross_entropy.compiled import compiled_loss

        return compiled_loss(logits, request)
    track = torch.is_grad_enabled() and logits.requires_grad
    return _CrossEntropy.apply(logits, request, track)  # type: ignore[no-any-return]
