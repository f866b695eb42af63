"""Cross-entropy over given logits in Triton: one pass that makes loss and gradient, nothing read back by the host.

N tokens (rows), V vocabulary. The same row kernel serves the fused linear loss.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ligerprof.errors import KernelInputError
from ligerprof.kernels.ce.factors import loss_divisor, reduce_losses, scale_by_device_factor, waits_for_loss_scale
from ligerprof.kernels.ce.rows import LossCall, loss_and_gradient
from ligerprof.kernels.options import PLAIN_LOSS, LossOptions


def graph_is_kept() -> bool:
    """Whether the backward that runs now may run again (`retain_graph=True`)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def make_call(
    labels: Tensor, vocab: int, options: LossOptions, class_weight: Tensor | None, device: torch.device
) -> LossCall:
    """Labels in one row on the device, and what each word weighs.

    Raises:
        KernelInputError: not one weight a word.
    """
    labels_N = labels.to(device).reshape(-1).contiguous()
    total = None
    if class_weight is not None:
        if class_weight.shape != (vocab,):
            raise KernelInputError(
                f"class weights of shape {tuple(class_weight.shape)} do not go with a vocabulary of {vocab}."
                " One weight a word is needed."
            )
        class_weight = class_weight.detach().to(device).contiguous()
        total = class_weight.sum() if options.label_smoothing > 0 else None
    return LossCall(
        labels_N=labels_N,
        seq_len=labels.shape[-1],
        vocab=vocab,
        options=options,
        class_weight_V=class_weight,
        class_weight_sum=total,
    )


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        num_items: Tensor | float | None,
        class_weight: Tensor | None,
        options: LossOptions,
        track: bool,
    ) -> Tensor:
        # detached: autograd must not look for the history of a view whose bytes change
        logits_NV = logits.detach().reshape(-1, logits.shape[-1])
        if logits_NV.stride(-1) != 1:
            logits_NV = logits_NV.contiguous()
        loss_N = torch.empty(labels.numel(), dtype=torch.float32, device=logits.device)
        call = make_call(labels, logits.shape[-1], options, class_weight, logits.device)
        call = dataclasses.replace(call, loss_N=loss_N)
        ctx.options, ctx.shape = options, logits.shape
        if options.reduction == "none":
            loss_and_gradient(call, logits_NV, None)
            ctx.save_for_backward(logits_NV, labels, class_weight)
            return loss_N.view(labels.shape)
        factor = loss_divisor(call, num_items)
        grad_NV = None
        if track:
            grad_NV = logits_NV if options.in_place else torch.empty_like(logits_NV)
        scale = None if waits_for_loss_scale(logits.dtype) else factor
        loss_and_gradient(dataclasses.replace(call, scale=scale), logits_NV, grad_NV)
        if grad_NV is logits_NV:
            # whoever saved the logits for backward learns that they are gone
            torch.autograd.graph.increment_version(logits)
        ctx.save_for_backward(grad_NV, factor)
        total = torch.empty((), dtype=torch.float32, device=logits.device)
        reduce_losses(loss_N, factor, total)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        in_place = not graph_is_kept()
        if ctx.options.reduction == "none":
            logits_NV, labels, class_weight = ctx.saved_tensors
            grad = logits_NV if in_place and ctx.options.in_place else torch.empty_like(logits_NV)
            call = make_call(labels, logits_NV.shape[-1], ctx.options, class_weight, logits_NV.device)
            scale = grad_loss.reshape(-1).contiguous()
            loss_and_gradient(dataclasses.replace(call, scale=scale), logits_NV, grad)
        else:
            made_NV, factor = ctx.saved_tensors
            late = factor if waits_for_loss_scale(made_NV.dtype) else None
            grad = scale_by_device_factor(made_NV, grad_loss, late, in_place=in_place)
        return grad.view(ctx.shape), None, None, None, None, None


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
    track = torch.is_grad_enabled() and logits.requires_grad
    return _CrossEntropy.apply(logits, labels, num_items, class_weight, options, track)  # type: ignore[no-any-return]
