"""Rotary position embedding in Triton: queries and keys in one launch, whatever their strides, in fp32.

B sequences, T tokens, H heads, D elements a head. The two halves of a head are the rotated pairs. Results lie in memory
as [B, T, H, D], both ways: so the linear layers before and behind see contiguous rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ligerprof.errors import KernelInputError
from ligerprof.kernels.device import on_device

# launch: one program a token; heads in tiles of at most this many pairs
_TILE_PAIRS = 2048
_WARPS = 4


@triton.jit
def _rotate(
    x_ptr,
    out_ptr,
    x_head_stride,
    heads,
    half,
    cos_low,
    cos_high,
    sin_low,
    sin_high,
    BACKWARD: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Rotate all heads of one token; `out` is contiguous."""
    pair = tl.arange(0, HALF)
    for start in range(0, heads, HEADS):
        head = start + tl.arange(0, HEADS)
        mask = (head < heads)[:, None] & (pair < half)[None, :]
        source = x_ptr + head.to(tl.int64)[:, None] * x_head_stride + pair[None, :]
        target = out_ptr + head[:, None] * (2 * half) + pair[None, :]
        low = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(source + half, mask=mask, other=0.0).to(tl.float32)
        if BACKWARD:
            # the transposed rotation
            new_low = low * cos_low[None, :] + high * sin_high[None, :]
            new_high = high * cos_high[None, :] - low * sin_low[None, :]
        else:
            new_low = low * cos_low[None, :] - high * sin_low[None, :]
            new_high = high * cos_high[None, :] + low * sin_high[None, :]
        tl.store(target, new_low.to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(target + half, new_high.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rope_kernel(
    q_ptr,
    k_ptr,
    q_out_ptr,
    k_out_ptr,
    cos_ptr,
    sin_ptr,
    q_batch_stride,
    q_head_stride,
    q_token_stride,
    k_batch_stride,
    k_head_stride,
    k_token_stride,
    cos_batch_stride,
    cos_token_stride,
    sin_batch_stride,
    sin_token_stride,
    tokens,
    q_heads,
    k_heads,
    half,
    BACKWARD: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    batch, token = program // tokens, program % tokens
    pair = tl.arange(0, HALF)
    mask = pair < half
    cos_ptr += batch * cos_batch_stride + token * cos_token_stride + pair
    sin_ptr += batch * sin_batch_stride + token * sin_token_stride + pair
    cos_low = tl.load(cos_ptr, mask=mask, other=0.0).to(tl.float32)
    cos_high = tl.load(cos_ptr + half, mask=mask, other=0.0).to(tl.float32)
    sin_low = tl.load(sin_ptr, mask=mask, other=0.0).to(tl.float32)
    sin_high = tl.load(sin_ptr + half, mask=mask, other=0.0).to(tl.float32)
    q_ptr += batch * q_batch_stride + token * q_token_stride
    k_ptr += batch * k_batch_stride + token * k_token_stride
    q_out_ptr += program * q_heads * 2 * half
    k_out_ptr += program * k_heads * 2 * half
    _rotate(
        q_ptr, q_out_ptr, q_head_stride, q_heads, half, cos_low, cos_high, sin_low, sin_high, BACKWARD, Q_HEADS, HALF
    )
    _rotate(
        k_ptr, k_out_ptr, k_head_stride, k_heads, half, cos_low, cos_high, sin_low, sin_high, BACKWARD, K_HEADS, HALF
    )


def _launch(
    q_BHTD: Tensor, k_BHTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, *, backward: bool
) -> tuple[Tensor, Tensor]:
    q, k, cos, sin = (_unit_stride(value) for value in (q_BHTD, k_BHTD, cos_BTD, sin_BTD))
    batch, q_heads, tokens, dim = q.shape
    k_heads = k.shape[1]
    q_out = torch.empty(batch, tokens, q_heads, dim, dtype=q.dtype, device=q.device)
    k_out = torch.empty(batch, tokens, k_heads, dim, dtype=k.dtype, device=k.device)
    half_block = triton.next_power_of_2(dim // 2)
    most_heads = max(1, _TILE_PAIRS // half_block)
    with on_device(q):
        _rope_kernel[(batch * tokens,)](
            q,
            k,
            q_out,
            k_out,
            cos,
            sin,
            *q.stride()[:3],
            *k.stride()[:3],
            # one sequence of angles may serve the whole batch
            0 if cos.shape[0] == 1 else cos.stride(0),
            cos.stride(1),
            0 if sin.shape[0] == 1 else sin.stride(0),
            sin.stride(1),
            tokens,
            q_heads,
            k_heads,
            dim // 2,
            BACKWARD=backward,
            Q_HEADS=min(triton.next_power_of_2(q_heads), most_heads),
            K_HEADS=min(triton.next_power_of_2(k_heads), most_heads),
            HALF=half_block,
            num_warps=_WARPS,
        )
    return q_out.transpose(1, 2), k_out.transpose(1, 2)


def _unit_stride(value: Tensor) -> Tensor:
    return value if value.stride(-1) == 1 else value.contiguous()


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _launch(q, k, cos, sin, backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, q_grad: Tensor, k_grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_launch(q_grad, k_grad, *ctx.saved_tensors, backward=True), None, None


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their positions' angles, in their own dtype.

    Args:
        q: [B, H, T, D] with `unsqueeze_dim` 1, [B, T, H, D] with 2, of any strides.
        k: the same with its own number of heads.
        cos: [B or 1, T, D].
        sin: [B or 1, T, D].

    Raises:
        KernelInputError: shapes that do not go together.
    """
    if unsqueeze_dim == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    if q.ndim != 4 or cos.shape[-2:] != q.shape[-2:] or k.shape[-2:] != q.shape[-2:] or q.shape[-1] % 2:
        raise KernelInputError(
            f"rope: queries {tuple(q.shape)}, keys {tuple(k.shape)} and angles {tuple(cos.shape)} do not go together."
        )
    q, k = _Rope.apply(q, k, cos, sin)
    return (q.transpose(1, 2), k.transpose(1, 2)) if unsqueeze_dim == 2 else (q, k)
