"""The norms in plain torch."""

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float = 0.0,
    *,
    bias: Tensor | None = None,
    casting: str = "gemma",
) -> Tensor:
    """Compute x / rms(x) * (weight + offset) + bias over the last axis, in x's dtype.

    Computed in fp32 or wider, unless the casting is `none`; with `llama` the normalized row is rounded.
    """
    dtype = x.dtype if casting == "none" else torch.promote_types(x.dtype, torch.float32)
    y = _normed(x.to(dtype), eps)
    if casting == "llama":
        y = y.to(x.dtype).to(dtype)
    if weight is not None:
        y = y * (weight.to(dtype) + offset)
    return (y if bias is None else y + bias.to(dtype)).to(x.dtype)


def _normed(wide: Tensor, eps: float) -> Tensor:
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def add_rms_norm(  # noqa: PLR0913 - the signature of its kernel
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float = 0.0,
    *,
    bias: Tensor | None = None,
    casting: str = "gemma",
    sum_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The RMSNorm of x + residual, and that sum."""
    total, dtype = _sum(x, residual, sum_dtype)
    return rms_norm(total, weight, eps, offset, bias=bias, casting=casting).to(dtype), total


def _sum(x: Tensor, residual: Tensor, sum_dtype: torch.dtype | None) -> tuple[Tensor, torch.dtype]:
    """The sum, and the dtype of its norm."""
    dtype = torch.promote_types(x.dtype, residual.dtype)
    return x.to(sum_dtype or dtype) + residual.to(sum_dtype or dtype), dtype


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Compute (x - mean) / std * weight + bias over the last axis."""
    parameter = weight if weight is not None else bias
    if parameter is None or parameter.ndim == 1:
        return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    y = functional.layer_norm(x, x.shape[-1:], None, None, eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    sum_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The LayerNorm of x + residual, and that sum."""
    total, dtype = _sum(x, residual, sum_dtype)
    return layer_norm(total, weight, bias, eps).to(dtype), total
