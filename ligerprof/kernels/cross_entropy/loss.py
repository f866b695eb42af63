"""From a loss request to the loss and its gradients: what both losses share, compiled or not.

Axes: N tokens (rows), V vocabulary.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from ligerprof.errors import KernelInputError
from ligerprof.kernels.cross_entropy.arguments import LossArguments
from ligerprof.kernels.cross_entropy.factors import loss_factor, reduce_losses, waits_for_loss_scale
from ligerprof.kernels.cross_entropy.rows import loss_and_gradient
from ligerprof.kernels.options import LossRequest

# runs the row kernels over all tokens
Launch = Callable[[LossArguments], None]


def compute_loss(request: LossRequest, vocab: int, launch: Launch, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """The loss, and the factor that its gradients still lack (one element), or None: see `waits_for_loss_scale`.

    Args:
        launch: writes losses and gradients.
        like: a tensor of the logits' device and dtype.

    Raises:
        KernelInputError: there is not one class weight per word.
    """
    arguments = _arguments(request, vocab, like.device)
    if request.options.reduction == "none":
        scale = None if request.token_scale is None else request.token_scale.reshape(-1).contiguous()
        launch(dataclasses.replace(arguments, scale=scale))
        return arguments.loss_N.view(request.labels.shape), None
    factor = loss_factor(arguments, request.num_items)
    total = torch.empty((), dtype=torch.float32, device=like.device)
    waits = waits_for_loss_scale(like.dtype)
    launch(dataclasses.replace(arguments, scale=None if waits else factor))
    reduce_losses(arguments.loss_N, factor, total)
    return total, factor if waits else None


def _arguments(request: LossRequest, vocab: int, device: torch.device) -> LossArguments:
    weight_V, total = request.class_weight, None
    if weight_V is not None:
        if weight_V.shape != (vocab,):
            raise KernelInputError(
                f"class weights of shape {tuple(weight_V.shape)} do not match a vocabulary of {vocab}."
                " Give one weight per word."
            )
        weight_V = weight_V.detach().to(device).contiguous()
        total = weight_V.sum(dtype=torch.float32) if request.options.label_smoothing > 0 else None
    return LossArguments(
        labels_N=request.labels.to(device).reshape(-1).contiguous(),
        loss_N=torch.empty(request.labels.numel(), dtype=torch.float32, device=device),
        seq_len=request.labels.shape[-1],
        vocab=vocab,
        options=request.options,
        class_weight_V=weight_V,
        class_weight_sum=total,
        prediction_N=request.predictions,
    )


def loss_of_logits(logits_NV: Tensor, grad_NV: Tensor | None, request: LossRequest) -> tuple[Tensor, Tensor | None]:
    """`compute_loss` over given logits; their gradient goes to `grad_NV` unless that is None."""
    return compute_loss(
        request, logits_NV.shape[1], lambda arguments: loss_and_gradient(arguments, logits_NV, grad_NV), logits_NV
    )
