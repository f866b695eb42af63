"""Cross-entropy over given logits in plain torch."""

import torch
from torch import Tensor
from torch.nn import functional

from ligerprof.kernels.options import PLAIN_LOSS, LossOptions


def next_labels(labels: Tensor, options: LossOptions) -> Tensor:
    """The label that each position is scored against."""
    if not options.shift:
        return labels
    return functional.pad(labels, (0, 1), value=options.ignore_index)[..., 1:].contiguous()


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
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if options.logit_scale != 1.0:
        wide = wide * options.logit_scale
    if options.softcap is not None:
        wide = options.softcap * torch.tanh(wide / options.softcap)
    targets = next_labels(labels, options)
    summed = options.reduction == "mean" and num_items is not None
    loss = functional.cross_entropy(
        wide.view(-1, wide.shape[-1]),
        targets.view(-1),
        weight=class_weight,
        ignore_index=options.ignore_index,
        label_smoothing=options.label_smoothing,
        reduction="sum" if summed else options.reduction,
    )
    if options.z_loss > 0:
        loss = loss + options.z_loss * _squared_normalizers(wide, targets, options, class_weight, summed)
    if summed and num_items is not None:
        return loss / num_items
    return loss.view(targets.shape) if options.reduction == "none" else loss


def _squared_normalizers(
    wide: Tensor, targets: Tensor, options: LossOptions, class_weight: Tensor | None, summed: bool
) -> Tensor:
    counts = targets != options.ignore_index
    weights = counts.to(wide.dtype)
    if class_weight is not None:
        weights = weights * class_weight[targets.where(counts, 0)]
    squares = weights * torch.logsumexp(wide, dim=-1).square()
    if options.reduction == "none":
        return squares.view(-1)
    return squares.sum() if summed or options.reduction == "sum" else squares.sum() / weights.sum()
