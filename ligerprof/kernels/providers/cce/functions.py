"""cut-cross-entropy's loss with our signature."""

import torch
from torch import Tensor

from ligerprof.errors import KernelUnavailableError
from ligerprof.kernels.cross_entropy.reference import next_labels
from ligerprof.kernels.options import PLAIN_LOSS, LossOptions
from ligerprof.kernels.tensors import product_dtype


def fused_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    options: LossOptions = PLAIN_LOSS,
    bias: Tensor | None = None,
    num_items: Tensor | float | None = None,
) -> Tensor:
    """Linear layer and cross-entropy in 16 bit, without logits in memory; backward omits small probabilities.

    Raises:
        KernelUnavailableError: an option that the package does not support, or fp32 tensors without autocast.
    """
    from cut_cross_entropy import linear_cross_entropy

    unsupported = ["bias"] if bias is not None else []
    for name in ("label_smoothing", "z_loss", "logit_scale"):
        if getattr(options, name) != getattr(PLAIN_LOSS, name):
            unsupported.append(name.replace("_", " "))
    if unsupported:
        raise KernelUnavailableError(f"cut-cross-entropy's loss has no {unsupported[0]}. Use provider ligerprof.")
    dtype = product_dtype(hidden)
    if dtype == torch.float32:
        raise KernelUnavailableError("cut-cross-entropy computes only in bf16 or fp16. Use provider ligerprof.")
    targets = next_labels(labels, options)
    divisor = num_items if options.reduction == "mean" else None
    loss: Tensor = linear_cross_entropy(
        hidden.to(dtype),
        weight.to(dtype),
        targets,
        ignore_index=options.ignore_index,
        softcap=options.softcap,
        reduction=options.reduction if divisor is None else "sum",
    )
    return loss if divisor is None else loss / divisor
