"""The two Triton kernels of tiled_log_probabilities, which allocate nothing.

One program per token folds a tile, and one program per token and block of words replaces a tile by its gradient.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _capped(logits, cap, HAS_CAP: tl.constexpr):
    # tanh(x) = 2 * sigmoid(2 x) - 1
    return cap * (2 * tl.sigmoid(2 * logits / cap) - 1) if HAS_CAP else logits


@triton.jit
def _fold_kernel(
    tile_ptr,
    row_stride,
    labels_ptr,
    highest_ptr,
    sums_ptr,
    weighted_ptr,
    earlier_ptr,
    of_label_ptr,
    first,
    words,
    cap,
    HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    own = tl.load(labels_ptr + row) - first
    highest, total = tl.load(highest_ptr + row), tl.load(sums_ptr + row)
    weighted, earlier = tl.load(weighted_ptr + row), tl.load(earlier_ptr + row)
    for start in range(0, words, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < words
        read = tl.load(tile_ptr + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
        logits = tl.where(inside, _capped(read, cap, HAS_CAP), -float("inf"))
        earlier = tl.maximum(earlier, tl.max(tl.where(columns < own, logits, -float("inf")), axis=0))
        new = tl.maximum(highest, tl.max(logits, axis=0))
        raised = tl.where(inside, tl.exp(logits - new), 0.0)
        decay = tl.exp(highest - new)
        total = total * decay + tl.sum(raised, axis=0)
        weighted = weighted * decay + tl.sum(raised * tl.where(inside, logits, 0.0), axis=0)
        highest = new
    tl.store(highest_ptr + row, highest)
    tl.store(sums_ptr + row, total)
    tl.store(weighted_ptr + row, weighted)
    tl.store(earlier_ptr + row, earlier)
    if (own >= 0) & (own < words):
        read = tl.load(tile_ptr + row * row_stride + own).to(tl.float32)
        tl.store(of_label_ptr + row, _capped(read, cap, HAS_CAP))


@triton.jit
def _differentiate_kernel(
    tile_ptr,
    row_stride,
    labels_ptr,
    normalizer_ptr,
    gradient_ptr,
    first,
    words,
    cap,
    HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < words
    pointers = tile_ptr + row * row_stride + columns
    logits = _capped(tl.load(pointers, mask=inside, other=0.0).to(tl.float32), cap, HAS_CAP)
    is_label = (columns + first == tl.load(labels_ptr + row)).to(tl.float32)
    result = tl.load(gradient_ptr + row) * (is_label - tl.exp(logits - tl.load(normalizer_ptr + row)))
    if HAS_CAP:
        result = result * (1 - (logits / cap) * (logits / cap))
    tl.store(pointers, result.to(tile_ptr.dtype.element_ty), mask=inside)


def launch_fold(tile: Tensor, labels: Tensor, first: int, cap: float | None, statistics: tuple[Tensor, ...]) -> None:
    """Launch `tiled_log_probabilities.fold` of a tile."""
    rows, words = tile.shape
    has_cap = cap is not None
    _fold_kernel[(rows,)](
        tile, tile.stride(0), labels, *statistics, first, words, cap or 1.0, HAS_CAP=has_cap, BLOCK=_BLOCK
    )


def launch_differentiate(
    tile: Tensor, labels: Tensor, first: int, cap: float | None, normalizer: Tensor, gradient: Tensor
) -> None:
    """Launch `tiled_log_probabilities.differentiate` of a tile."""
    rows, words = tile.shape
    has_cap = cap is not None
    _differentiate_kernel[(rows, triton.cdiv(words, _BLOCK))](
        tile, tile.stride(0), labels, normalizer, gradient, first, words, cap or 1.0, HAS_CAP=has_cap, BLOCK=_BLOCK
    )
