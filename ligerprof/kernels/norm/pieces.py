"""The norms of rows that are too long for one program to hold: each pass reads the row piece by piece.

The arguments are those of the kernels in `rows`. One program per row in forward; in backward a program walks over rows,
and adds each one to its partial sums in memory.

Axes: N rows, D columns.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

import triton
import triton.language as tl

from ligerprof.errors import KernelInputError
from ligerprof.kernels.device import on_device
from ligerprof.kernels.norm.rounding import round_to

# launch config: columns of a piece
_PIECE = 8192
_WARPS = 16


@triton.jit
def _load_piece(x_ptr, residual_ptr, sum_ptr, column, mask):
    """A piece of what is normalized, after the first pass has stored the sum."""
    source = x_ptr if residual_ptr is None else sum_ptr
    return tl.load(source + column, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _pieces_fwd_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    sum_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    x_stride,
    residual_stride,
    columns,
    eps,
    offset,
    CASTING: tl.constexpr,
    PIECE: tl.constexpr,
):
    row = tl.program_id(0)
    row64 = row.to(tl.int64)
    x_ptr += row64 * x_stride
    y_ptr += row64 * columns
    if residual_ptr is not None:
        residual_ptr += row64 * residual_stride
        sum_ptr += row64 * columns
    # a casting rounds to the dtype of what is normalized
    normalized_ptr = y_ptr if residual_ptr is None else sum_ptr
    lane = tl.arange(0, PIECE)
    total = tl.zeros([PIECE], dtype=tl.float32)
    for start in range(0, columns, PIECE):
        column = start + lane
        mask = column < columns
        x = tl.load(x_ptr + column, mask=mask, other=0.0).to(tl.float32)
        if residual_ptr is not None:
            x += tl.load(residual_ptr + column, mask=mask, other=0.0).to(tl.float32)
            # normalize the rounded sum: the next layer reads that one
            rounded = x.to(sum_ptr.dtype.element_ty)
            tl.store(sum_ptr + column, rounded, mask=mask)
            x = rounded.to(tl.float32)
        if mean_ptr is None:
            x *= x
            if CASTING == "none":
                x = round_to(x, normalized_ptr)
        total += x
    # later passes may read the sum by other threads
    tl.debug_barrier()
    mean = 0.0
    if mean_ptr is None:
        variance = tl.sum(total) / columns
    else:
        mean = tl.sum(total) / columns
        shifts = tl.zeros([PIECE], dtype=tl.float32)
        squares = tl.zeros([PIECE], dtype=tl.float32)
        for start in range(0, columns, PIECE):
            column = start + lane
            mask = column < columns
            x = tl.where(mask, _load_piece(x_ptr, residual_ptr, sum_ptr, column, mask) - mean, 0.0)
            shifts += x
            squares += x * x
        shift = tl.sum(shifts) / columns
        mean += shift
        variance = tl.maximum(tl.sum(squares) / columns - shift * shift, 0.0)
        tl.store(mean_ptr + row, mean)
    if CASTING == "none":
        variance = round_to(variance, normalized_ptr)
    rstd = tl.rsqrt(variance + tl.cast(eps, tl.float32))
    if CASTING == "none":
        rstd = round_to(rstd, normalized_ptr)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, columns, PIECE):
        column = start + lane
        mask = column < columns
        y = (_load_piece(x_ptr, residual_ptr, sum_ptr, column, mask) - mean) * rstd
        if CASTING != "gemma":
            y = round_to(y, normalized_ptr)
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
            if offset is not None:
                weight += tl.cast(offset, tl.float32)
            y *= weight
        if bias_ptr is not None:
            y += tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + column, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_weighted(dy_ptr, weight_ptr, offset, column, mask):
    """A piece of the incoming gradient, and the same times the weight."""
    dy = tl.load(dy_ptr + column, mask=mask, other=0.0).to(tl.float32)
    weighted = dy
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
        if offset is not None:
            weight += tl.cast(offset, tl.float32)
        weighted = dy * weight
    return dy, weighted


@triton.jit
def _add_to(sums_ptr, value, mask, IS_FIRST):
    """Add to partial sums; the first row writes them."""
    value += tl.load(sums_ptr, mask=mask & (IS_FIRST == 0), other=0.0)
    tl.store(sums_ptr, value, mask=mask)


@triton.jit
def _pieces_bwd_kernel(
    dy_ptr,
    sum_grad_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    narrow_dx_ptr,
    weight_partial_ptr,
    bias_partial_ptr,
    dy_stride,
    sum_grad_stride,
    x_stride,
    rows,
    columns,
    offset,
    CASTING: tl.constexpr,
    PIECE: tl.constexpr,
):
    program = tl.program_id(0)
    partial = program.to(tl.int64) * columns
    lane = tl.arange(0, PIECE)
    for row in range(program, rows, tl.num_programs(0)):
        row64 = tl.cast(row, tl.int64)
        x_row_ptr, dy_row_ptr = x_ptr + row64 * x_stride, dy_ptr + row64 * dy_stride
        mean = 0.0 if mean_ptr is None else tl.load(mean_ptr + row)
        rstd = tl.load(rstd_ptr + row)
        alongs = tl.zeros([PIECE], dtype=tl.float32)
        levels = tl.zeros([PIECE], dtype=tl.float32)
        for start in range(0, columns, PIECE):
            column = start + lane
            mask = column < columns
            normed = (tl.load(x_row_ptr + column, mask=mask, other=0.0).to(tl.float32) - mean) * rstd
            _, weighted = _load_weighted(dy_row_ptr, weight_ptr, offset, column, mask)
            alongs += normed * weighted
            levels += weighted
        along = tl.sum(alongs) / columns
        level = 0.0 if mean_ptr is None else tl.sum(levels) / columns
        for start in range(0, columns, PIECE):
            column = start + lane
            mask = column < columns
            normed = (tl.load(x_row_ptr + column, mask=mask, other=0.0).to(tl.float32) - mean) * rstd
            dy, weighted = _load_weighted(dy_row_ptr, weight_ptr, offset, column, mask)
            dx = rstd * (weighted - normed * along - level)
            if sum_grad_ptr is not None:
                from_sum = sum_grad_ptr + row64 * sum_grad_stride + column
                dx += tl.load(from_sum, mask=mask, other=0.0).to(tl.float32)
            out = row64 * columns + column
            tl.store(dx_ptr + out, dx.to(dx_ptr.dtype.element_ty), mask=mask)
            if narrow_dx_ptr is not None:
                tl.store(narrow_dx_ptr + out, dx.to(narrow_dx_ptr.dtype.element_ty), mask=mask)
            if CASTING != "gemma":
                normed = round_to(normed, x_ptr)
            if weight_partial_ptr is not None:
                _add_to(weight_partial_ptr + partial + column, dy * normed, mask, row == program)
            if bias_partial_ptr is not None:
                _add_to(bias_partial_ptr + partial + column, dy, mask, row == program)
        # the next row may add to the same sums by other threads
        tl.debug_barrier()


def launch_forward_in_pieces(rows: int, heads: int | None, arguments: dict[str, Any]) -> None:
    """Launch the forward kernel over long rows."""
    _launch(_pieces_fwd_kernel, rows, heads, arguments)


def launch_backward_in_pieces(programs: int, heads: int | None, arguments: dict[str, Any]) -> None:
    """Launch the backward kernel over long rows."""
    _launch(_pieces_bwd_kernel, programs, heads, arguments)


def _launch(kernel: Any, programs: int, heads: int | None, arguments: dict[str, Any]) -> None:
    """Launch programs over long rows.

    Raises:
        KernelInputError: each head has a weight.
    """
    if heads is not None:
        raise KernelInputError(f"a norm over {arguments['columns']} columns takes one weight for all heads. Give [D].")
    with on_device(arguments["x_ptr"]):
        kernel[(programs,)](**arguments, PIECE=_PIECE, num_warps=_WARPS)
