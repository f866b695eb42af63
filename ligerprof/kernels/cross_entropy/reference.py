"""Cross-entropy over given logits in plain torch."""

import torch
from torch import Tensor
from torch.nn import functional

from ligerprof.kernels.options import PLAIN_LOSS, LossOptions, LossOutputs


def next_labels(labels: Tensor, options: LossOptions) -> Tensor:
    """The label that each position is scored against."""
    if not options.shift or labels.ndim == 0:
        return labels
    shift = int(options.shift)
    return functional.pad(labels, (0, shift), value=options.ignore_index)[..., shift:].contiguous()


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    options: LossOptions = PLAIN_LOSS,
    num_items: Tensor | float | None = None,
    class_weight: Tensor | None = None,
) -> Tensor:
    """Cross-entropy of logits [..., V] against labels [...], computed in fp32 or wider.

    Args:
        num_items: divisor of the reduction `mean`, instead of the number of labels.
        class_weight: [V], weight of each label's loss; a mean divides by the sum of the labels' weights.
    """
    if options.token_scaling:
        return cross_entropy_outputs(logits, labels, options, num_items, class_weight).loss
    wide, targets = _in_formula(logits, options), next_labels(labels, options)
    summed = options.reduction == "mean" and num_items is not None
    loss = functional.cross_entropy(
        wide.reshape(-1, wide.shape[-1]),
        targets.reshape(-1).long(),
        weight=None if class_weight is None else class_weight.to(wide.dtype),
        ignore_index=options.ignore_index,
        label_smoothing=options.label_smoothing,
        reduction="sum" if summed else options.reduction,
    )
    if options.z_loss > 0:
        loss = loss + options.z_loss * _squared_normalizers(wide, targets, options, summed)
    if summed and num_items is not None:
        return loss / num_items
    return loss.view(targets.shape) if options.reduction == "none" else loss


def cross_entropy_outputs(
    logits: Tensor,
    labels: Tensor,
    options: LossOptions = PLAIN_LOSS,
    num_items: Tensor | float | None = None,
    class_weight: Tensor | None = None,
) -> LossOutputs:
    """Every result of `LossOutputs`; the arguments are those of `cross_entropy`."""
    wide, targets = _in_formula(logits, options), next_labels(labels, options)
    counts = targets != options.ignore_index
    log_p = torch.log_softmax(wide, dim=-1)
    lse = torch.logsumexp(wide, dim=-1) * counts
    p = log_p.exp()
    losses = functional.cross_entropy(
        wide.reshape(-1, wide.shape[-1]),
        targets.reshape(-1).long(),
        weight=None if class_weight is None else class_weight.to(wide.dtype),
        ignore_index=options.ignore_index,
        label_smoothing=options.label_smoothing,
        reduction="none",
    ).view(targets.shape)
    z_losses = options.z_loss * lse.square()
    if options.token_scaling:
        scale = p.gather(-1, targets.where(counts, 0).long().unsqueeze(-1)).squeeze(-1).detach()
        losses, z_losses = losses * scale, z_losses * scale
    predicted = wide.argmax(-1).where(counts, -1)
    right = ((predicted == targets) & counts).to(losses.dtype)

    def reduced(values: Tensor, weights: Tensor) -> Tensor:
        if options.reduction == "none":
            return values
        divisor: Tensor | float = 1.0
        if options.reduction == "mean":
            divisor = weights.sum() if num_items is None else num_items
        return values.sum() / divisor

    z_loss = reduced(z_losses, counts)
    return LossOutputs(
        loss=reduced(losses, _label_weights(wide, targets, options, class_weight)) + z_loss,
        lse=lse,
        entropy=-(p * log_p.where(p > 0, 0.0)).sum(-1) * counts,
        z_loss=z_loss.detach(),
        token_accuracy=right if options.reduction == "none" else right.sum() / counts.sum(),
        predicted_tokens=predicted,
    )


def _in_formula(logits: Tensor, options: LossOptions) -> Tensor:
    """The logits as the loss sees them."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if options.logit_scale != 1.0:
        wide = wide * options.logit_scale
    if options.softcap is not None:
        wide = options.softcap * torch.tanh(wide / options.softcap)
    return wide


def _label_weights(wide: Tensor, targets: Tensor, options: LossOptions, class_weight: Tensor | None) -> Tensor:
    """Each label's class weight; 0 if it is ignored."""
    counts = targets != options.ignore_index
    weights = counts.to(wide.dtype)
    return weights if class_weight is None else weights * class_weight[targets.where(counts, 0).long()]


def _squared_normalizers(wide: Tensor, targets: Tensor, options: LossOptions, summed: bool) -> Tensor:
    counts = targets != options.ignore_index
    squares = counts * torch.logsumexp(wide, dim=-1).square()
    if options.reduction == "none":
        return squares.reshape(-1)
    return squares.sum() if summed or options.reduction == "sum" else squares.sum() / counts.sum()
