"""Rotary position embedding in plain torch."""

import torch
from torch import Tensor


def apply_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys [B, H, T, D] (or [B, T, H, D] with `unsqueeze_dim` 2) by angles [B or 1, T, R].

    The last D - R elements of a head stay as they are. Angles may lack the axis of sequences: [T, R].

    Args:
        interleaved: the rotated pairs are neighbors; otherwise they are the two halves of the first R elements.
    """
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _rotated(q, cos, sin, interleaved), _rotated(k, cos, sin, interleaved)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    width = cos.shape[-1]
    turned, rest = (x, None) if width == x.shape[-1] else (x[..., :width], x[..., width:])
    turned = (turned * cos + _quarter_turn(turned, interleaved) * sin).to(x.dtype)
    return turned if rest is None else torch.cat((turned, rest), dim=-1)


def _quarter_turn(x: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    low, high = x.chunk(2, dim=-1)
    return torch.cat((-high, low), dim=-1)
