"""liger-kernel's operations with our signatures, called as in a transformers model that Liger has patched."""

from typing import Any

from torch import Tensor

from ligerprof.errors import KernelInputError, KernelUnavailableError
from ligerprof.kernels.cross_entropy.reference import next_labels
from ligerprof.kernels.options import PLAIN_LOSS, LossOptions


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys [B, H, T, D] in place.

    Raises:
        KernelInputError: other axes, for which liger-kernel would write outside of them.
    """
    if unsqueeze_dim != 1:
        raise KernelInputError(
            f"rope: liger-kernel takes [B, heads, T, D], not unsqueeze_dim={unsqueeze_dim}. Use another provider."
        )
    from liger_kernel.ops.rope import LigerRopeFunction

    return LigerRopeFunction.apply(q, k, cos, sin, None, unsqueeze_dim)  # type: ignore[no-any-return]


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """RMSNorm; its gradient overwrites the gradient of its output."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(x, weight, eps, offset, "gemma" if offset else "llama")  # type: ignore[no-any-return]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm."""
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return LigerLayerNormFunction.apply(x, weight, bias, eps)  # type: ignore[no-any-return]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Silu(gate) * up; backward overwrites both."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(gate, up)  # type: ignore[no-any-return]


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Gelu(gate) * up with GELU's tanh approximation; backward overwrites both."""
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    return LigerGELUMulFunction.apply(gate, up)  # type: ignore[no-any-return]


def cross_entropy(
    logits: Tensor, labels: Tensor, options: LossOptions = PLAIN_LOSS, num_items: Tensor | float | None = None
) -> Tensor:
    """Cross-entropy over logits cast to fp32; the gradient overwrites the cast copy."""
    from liger_kernel.transformers.functional import liger_cross_entropy

    targets = next_labels(labels, options)
    # of a row with gaps, liger-kernel 0.8.5 makes a copy without `requires_grad`, and returns it as the gradient
    rows = logits.float().contiguous().view(-1, logits.shape[-1])
    loss: Tensor = liger_cross_entropy(rows, targets.view(-1), **_loss_arguments(options, num_items))
    return _divided(loss, targets, options, num_items)


def fused_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    options: LossOptions = PLAIN_LOSS,
    bias: Tensor | None = None,
    num_items: Tensor | float | None = None,
) -> Tensor:
    """Linear layer and cross-entropy in chunks of logits as large as the hidden states."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    targets = next_labels(labels, options)
    loss: Tensor = liger_fused_linear_cross_entropy(
        hidden.view(-1, hidden.shape[-1]), weight, targets.view(-1), bias=bias, **_loss_arguments(options, num_items)
    )
    return _divided(loss, targets, options, num_items)


def _loss_arguments(options: LossOptions, num_items: Tensor | float | None) -> dict[str, Any]:
    if options.logit_scale != 1.0:
        raise KernelUnavailableError("liger-kernel's losses have no logit scale. Use provider ligerprof.")
    summed = num_items is not None and options.reduction == "mean"
    return {
        "ignore_index": options.ignore_index,
        "label_smoothing": options.label_smoothing,
        "lse_square_scale": options.z_loss,
        "softcap": options.softcap,
        "reduction": "sum" if summed else options.reduction,
    }


def _divided(loss: Tensor, targets: Tensor, options: LossOptions, num_items: Tensor | float | None) -> Tensor:
    if options.reduction == "none":
        return loss.view(targets.shape)
    return loss / num_items if num_items is not None and options.reduction == "mean" else loss
