"""Rotary position embedding in Triton: queries and keys of any strides in one launch, in fp32.

The two halves of a head, or neighbors, are the rotated pairs; elements after those that have an angle stay as they are.
Results overwrite the inputs or lie in new memory as [B, T, H, D], in
forward and in backward, so that the linear layers before and after see contiguous rows.

Axes: B sequences, T tokens, H heads, D elements per head.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligerprof.errors import KernelInputError
from ligerprof.kernels.device import on_device
from ligerprof.kernels.sizes import ceil_div, next_power_of_2
from ligerprof.kernels.tensors import (
    check_tensors,
    first_order_only,
    is_part_of_a_leaf,
    is_unshared,
    overlaps_itself,
)

# launch config: a program rotates a few heads of one token; consecutive programs take neighboring memory
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
    rest,
    BACKWARD: tl.constexpr,
    IN_PLACE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    Q_GROUPS: tl.constexpr,
    K_GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    """Rotate one group of HEADS heads of one token; the groups of queries precede those of keys.

    The last `rest` elements of a head are copied; None if there are none, or if they are in place.
    """
    GROUPS: tl.constexpr = Q_GROUPS + K_GROUPS
    place = (tl.program_id(0) // GROUPS).to(tl.int64)
    group = tl.program_id(0) % GROUPS
    batch, token = place // tokens, place % tokens
    pair = tl.arange(0, HALF)
    in_half = pair < half
    width = 2 * half
    if rest is not None:
        width += rest
    apart = half
    if INTERLEAVED:
        pair *= 2
        apart = 1
    cos_ptr += batch * cos_batch_stride + token * cos_token_stride + pair
    sin_ptr += batch * sin_batch_stride + token * sin_token_stride + pair
    cos_low = tl.load(cos_ptr, mask=in_half, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(cos_ptr + apart, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin_low = tl.load(sin_ptr, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(sin_ptr + apart, mask=in_half, other=0.0).to(tl.float32)[None, :]
    if group < Q_GROUPS:
        x_ptr = q_ptr + batch * q_batch_stride + token * q_token_stride
        out_ptr = q_out_ptr + place * q_heads * width
        heads, head_stride, first = q_heads, q_head_stride, group * HEADS
    else:
        x_ptr = k_ptr + batch * k_batch_stride + token * k_token_stride
        out_ptr = k_out_ptr + place * k_heads * width
        heads, head_stride, first = k_heads, k_head_stride, (group - Q_GROUPS) * HEADS
    head = first + tl.arange(0, HEADS)
    mask = (head < heads)[:, None] & in_half[None, :]
    source = x_ptr + head.to(tl.int64)[:, None] * head_stride + pair[None, :]
    target = source if IN_PLACE else out_ptr + head[:, None] * width + pair[None, :]
    low = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + apart, mask=mask, other=0.0).to(tl.float32)
    if BACKWARD:
        # the transposed rotation
        new_low = low * cos_low + high * sin_high
        new_high = high * cos_high - low * sin_low
    else:
        new_low = low * cos_low - high * sin_low
        new_high = high * cos_high + low * sin_high
    tl.store(target, new_low.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(target + apart, new_high.to(out_ptr.dtype.element_ty), mask=mask)
    if rest is not None:
        column = tl.arange(0, REST)
        mask = (head < heads)[:, None] & (column < rest)[None, :]
        source = x_ptr + head.to(tl.int64)[:, None] * head_stride + 2 * half + column[None, :]
        target = out_ptr + head[:, None] * width + 2 * half + column[None, :]
        tl.store(target, tl.load(source, mask=mask, other=0.0), mask=mask)


def _rotate(
    q_BHTD: Tensor,
    k_BHTD: Tensor,
    cos_BTR: Tensor,
    sin_BTR: Tensor,
    *,
    interleaved: bool,
    backward: bool = False,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    q, k, cos, sin = (_unit_stride(value) for value in (q_BHTD, k_BHTD, cos_BTR, sin_BTR))
    batch, q_heads, tokens, dim = q.shape
    k_heads = k.shape[1]
    q_out, k_out = q, k
    if not in_place:
        q_out = torch.empty(batch, tokens, q_heads, dim, dtype=q.dtype, device=q.device)
        k_out = torch.empty(batch, tokens, k_heads, dim, dtype=k.dtype, device=k.device)
    half = cos.shape[-1] // 2
    rest = None if in_place or dim == 2 * half else dim - 2 * half
    half_block = next_power_of_2(half)
    heads = min(next_power_of_2(q_heads), max(1, _TILE_PAIRS // half_block))
    q_groups, k_groups = ceil_div(q_heads, heads), ceil_div(k_heads, heads)
    with on_device(q):
        _rope_kernel[(batch * tokens * (q_groups + k_groups),)](
            q_ptr=q,
            k_ptr=k,
            q_out_ptr=q_out,
            k_out_ptr=k_out,
            cos_ptr=cos,
            sin_ptr=sin,
            q_batch_stride=q.stride(0),
            q_head_stride=q.stride(1),
            q_token_stride=q.stride(2),
            k_batch_stride=k.stride(0),
            k_head_stride=k.stride(1),
            k_token_stride=k.stride(2),
            # one sequence of angles may serve the whole batch
            cos_batch_stride=0 if cos.shape[0] == 1 else cos.stride(0),
            cos_token_stride=cos.stride(1),
            sin_batch_stride=0 if sin.shape[0] == 1 else sin.stride(0),
            sin_token_stride=sin.stride(1),
            tokens=tokens,
            q_heads=q_heads,
            k_heads=k_heads,
            half=half,
            rest=rest,
            BACKWARD=backward,
            IN_PLACE=in_place,
            INTERLEAVED=interleaved,
            Q_GROUPS=q_groups,
            K_GROUPS=k_groups,
            HEADS=heads,
            HALF=half_block,
            REST=next_power_of_2(rest or 1),
            num_warps=_WARPS,
        )
    if not in_place:
        return q_out.transpose(1, 2), k_out.transpose(1, 2)
    # bump the version counters, so that autograd raises an error if another backward pass needs q or k
    torch.autograd.graph.increment_version((q, k))
    # new tensors on the same memory: mark_dirty does not accept views among several outputs
    return q.detach(), k.detach()


def _unit_stride(value: Tensor) -> Tensor:
    return value if value.stride(-1) == 1 else value.contiguous()


def _can_be_overwritten(x: Tensor) -> bool:
    """Whether the kernel may write over x: no other tensor and no two of its elements share its memory."""
    return x.stride(-1) == 1 and not is_part_of_a_leaf(x) and is_unshared(x) and not overlaps_itself(x)


def _shapes_match(q: Tensor, k: Tensor, *angles: Tensor) -> bool:
    if (q.ndim, k.ndim) != (4, 4):
        return False
    batch, _, tokens, dim = q.shape
    keys_match = k.shape == (batch, k.shape[1], tokens, dim)
    width = angles[0].shape[-1]
    fits = width % 2 == 0 and 0 < width <= dim
    return keys_match and fits and all(angle.shape in ((1, tokens, width), (batch, tokens, width)) for angle in angles)


def _heads_follow_tokens(angles: Tensor, unsqueeze_dim: int) -> bool:
    """Whether the axis of heads, which angles [.., T, R] lack, comes after that of tokens."""
    return unsqueeze_dim in ((1, -2) if angles.ndim == 2 else (2, -2))


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, in_place: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(q, k, cos, sin, interleaved=interleaved, in_place=in_place)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, q_grad: Tensor, k_grad: Tensor) -> tuple[Tensor | None, ...]:
        # not in place: autograd may pass the same gradients to other functions
        grads = _rotate(q_grad, k_grad, *ctx.saved_tensors, interleaved=ctx.interleaved, backward=True)
        return *grads, None, None, None, None


def apply_rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    unsqueeze_dim: int = 1,
    *,
    interleaved: bool = False,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by the angles of their positions, in their own dtype.

    The last D - R elements of a head stay as they are.

    Args:
        q: [B, H, T, D] with `unsqueeze_dim` 1, [B, T, H, D] with 2, of any strides. With angles [T, R], and with or
            without the axis B: [B, H, T, D] with 0, [B, T, H, D] with 1 or -2 (vision towers).
        k: like q, with its own number of heads.
        cos: [B or 1, T, R], or [T, R] for all sequences.
        sin: like cos.
        interleaved: the rotated pairs are neighbors; otherwise they are the two halves of the first R elements.
        in_place: allow the results to overwrite q and k. They do not under torch.compile, if q or k is a leaf that
            wants a gradient or a view of one, or if other tensors or several elements share the memory. A backward
            pass that needs the overwritten q or k raises torch's error.

    Raises:
        KernelInputError: the shapes do not match, or the angles require a gradient, which this kernel does not compute.
    """
    check_tensors("rope", q, k, cos, sin)
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise KernelInputError(
            "rope: the angles require a gradient, which the kernel does not compute."
            " Detach them, or use the provider torch."
        )
    if q.dtype != k.dtype:
        # one launch has one dtype. In the wider one, nothing is rounded that the result does not round
        wide = torch.promote_types(q.dtype, k.dtype)
        wide_q, wide_k = apply_rope(
            q.to(wide), k.to(wide), cos, sin, unsqueeze_dim, interleaved=interleaved, in_place=in_place
        )
        return wide_q.to(q.dtype), wide_k.to(k.dtype)
    if q.ndim == 3 and cos.ndim == 2:
        # one sequence: the same with an axis for it
        dim = 2 if _heads_follow_tokens(cos, unsqueeze_dim) else 1
        q, k = apply_rope(q[None], k[None], cos[None], sin[None], dim, interleaved=interleaved, in_place=in_place)
        return q[0], k[0]
    if cos.ndim == 2:
        unsqueeze_dim, cos, sin = 2 if _heads_follow_tokens(cos, unsqueeze_dim) else 1, cos[None], sin[None]
    may_overwrite = in_place and not torch.compiler.is_compiling() and q is not k
    in_place = may_overwrite and _can_be_overwritten(q) and _can_be_overwritten(k)
    if unsqueeze_dim in (2, -2):
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    if not _shapes_match(q, k, cos, sin):
        raise KernelInputError(
            f"rope: queries {tuple(q.shape)}, keys {tuple(k.shape)} and angles {tuple(cos.shape)} do not match."
            " Angles need the tokens of queries and keys, and an even size that is at most a head's."
        )
    q, k = _Rope.apply(q, k, cos, sin, interleaved, in_place)
    return (q.transpose(1, 2), k.transpose(1, 2)) if unsqueeze_dim in (2, -2) else (q, k)


def apply_rope_in_place(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """`apply_rope` that may overwrite queries and keys, as an attention layer calls it."""
    return apply_rope(q, k, cos, sin, unsqueeze_dim, interleaved=interleaved, in_place=True)


def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    unsqueeze_dim: int = 1,
    *,
    interleaved: bool = False,
    in_place: bool = False,
) -> Tensor:
    """Rotate one tensor of heads, as `apply_rope` rotates queries.

    Raises:
        KernelInputError: see `apply_rope`.
    """
    heads = x.ndim - 2 if _heads_follow_tokens(cos, unsqueeze_dim) else x.ndim - 3
    # keys without heads, in memory of their own: x may be overwritten
    keys = x.new_empty([0 if axis == heads else size for axis, size in enumerate(x.shape)])
    return apply_rope(x, keys, cos, sin, unsqueeze_dim, interleaved=interleaved, in_place=in_place)[0]
