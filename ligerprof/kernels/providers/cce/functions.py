"""cut-cross-entropy's loss with the signature of ours."""

import torch
from torch import Tensor

from ligerprof.errors import KernelUnavailableError
from ligerprof.kernels.cross_entropy.reference import next_labels
from ligerprof.kernels.options import PLAIN_LOSS, LossOptions


def fused_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    options: LossOptions = PLAIN_LOSS,
    bias: Tensor | None = None,
    num_items: Tensor | float | None = None,
) -> Tensor:
    """Linear layer and cross-entropy without logits in memory, in 16 bit; backward leaves out small probabilities.

    Raises:
        KernelUnavailableError: something that the package's loss does not have, or tensors in fp32 without autocast.
    """
    from cut_cross_entropy import linear_cross_entropy

    _refuse_what_it_has_not(options, bias)
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    if dtype == torch.float32:
        raise KernelUnavailableError("cut-cross-entropy computes in bf16 or fp16 alone. Use provider ligerprof.")
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


def _refuse_what_it_has_not(options: LossOptions, bias: Tensor | None) -> None:
    plain = LossOptions()
    asked = {"a bias": bias is not None} | {
        name.replace("_", " "): getattr(options, name) != getattr(plain, name)
        for name in ("label_smoothing", "z_loss", "logit_scale")
    }
    if missing := [name for name, wanted in asked.items() if wanted]:
        raise KernelUnavailableError(
            f"cut-cross-entropy's loss has no {missing[0].removeprefix('a ')}. Use provider ligerprof."
        )
