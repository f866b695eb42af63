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

# launch: a program turns a few heads of one token; neighbours in memory follow one another
_TILE_PAIRS = 1024
_WARPS = 4


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
    Q_GROUPS: tl.constexpr,
    K_GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Rotate one group of HEADS heads of one token; the groups of queries come before those of keys."""
    GROUPS: tl.constexpr = Q_GROUPS + K_GROUPS
    place = (tl.program_id(0) // GROUPS).to(tl.int64)
    group = tl.program_id(0) % GROUPS
    batch, token = place // tokens, place % tokens
    pair = tl.arange(0, HALF)
    in_half = pair < half
    cos_ptr += batch * cos_batch_stride + token * cos_token_stride + pair
    sin_ptr += batch * sin_batch_stride + token * sin_token_stride + pair
    cos_low = tl.load(cos_ptr, mask=in_half, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(cos_ptr + half, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin_low = tl.load(sin_ptr, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(sin_ptr + half, mask=in_half, other=0.0).to(tl.float32)[None, :]
    if group < Q_GROUPS:
        x_ptr = q_ptr + batch * q_batch_stride + token * q_token_stride
        out_ptr = q_out_ptr + place * q_heads * 2 * half
        heads, head_stride, first = q_heads, q_head_stride, group * HEADS
    else:
        x_ptr = k_ptr + batch * k_batch_stride + token * k_token_stride
        out_ptr = k_out_ptr + place * k_heads * 2 * half
        heads, head_stride, first = k_heads, k_head_stride, (group - Q_GROUPS) * HEADS
    head = first + tl.arange(0, HEADS)
    mask = (head < heads)[:, None] & in_half[None, :]
    source = x_ptr + head.to(tl.int64)[:, None] * head_stride + pair[None, :]
    target = out_ptr + head[:, None] * (2 * half) + pair[None, :]
    low = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + half, mask=mask, other=0.0).to(tl.float32)
    if BACKWARD:
        # the transposed rotation
        new_low = low * cos_low + high * sin_high
        new_high = high * cos_high - low * sin_low
    else:
        new_low = low * cos_low - high * sin_low
        new_high = high * cos_high + low * sin_high
    tl.store(target, new_low.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(target + half, new_high.to(out_ptr.dtype.element_ty), mask=mask)


def _launch(
    q_BHTD: Tensor, k_BHTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, *, backward: bool
) -> tuple[Tensor, Tensor]:
    q, k, cos, sin = (_unit_stride(value) for value in (q_BHTD, k_BHTD, cos_BTD, sin_BTD))
    batch, q_heads, tokens, dim = q.shape
    k_heads = k.shape[1]
    q_out = torch.empty(batch, tokens, q_heads, dim, dtype=q.dtype, device=q.device)
    k_out = torch.empty(batch, tokens, k_heads, dim, dtype=k.dtype, device=k.device)
    half_block = triton.next_power_of_2(dim // 2)
    heads = min(triton.next_power_of_2(q_heads), max(1, _TILE_PAIRS // half_block))
    q_groups, k_groups = triton.cdiv(q_heads, heads), triton.cdiv(k_heads, heads)
    with on_device(q):
        _rope_kernel[(batch * tokens * (q_groups + k_groups),)](
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
            Q_GROUPS=q_groups,
            K_GROUPS=k_groups,
            HEADS=heads,
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
