"""The norms in plain torch."""

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Compute x / rms(x) * (weight + offset) over the last axis, computed in fp32 or wider, in x's dtype."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return (_normed(x.to(dtype), eps) * (weight.to(dtype) + offset)).to(x.dtype)


def _normed(wide: Tensor, eps: float) -> Tensor:
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """The RMSNorm of x + residual, and that sum."""
    total = x + residual
    return rms_norm(total, weight, eps, offset), total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Compute (x - mean) / std * weight + bias over the last axis."""
    return functional.layer_norm(x, weight.shape, weight, bias, eps)
