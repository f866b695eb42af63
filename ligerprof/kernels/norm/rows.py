"""The norm kernels of rows that a program holds whole: one tile of rows per program, or several in turn.

Axes: N rows, D columns, P programs of the backward launch. See `triton` for arguments that are None.

The arguments are those of the kernels in `rows`. One program per row in forward; in backward a program walks over rows,
and adds each one to its partial sums in memory.

Axes: N rows, D columns.
"""

from typing import Any, Literal, get_args

import triton
import triton.language as tl

from ligerprof.errors import KernelInputError
from ligerprof.kernels.device import on_device

# mypy: allow-untyped-defs, allow-incomplete-defs


Casting = Literal["gemma", "llama", "none"]
CASTINGS: tuple[str, ...] = get_args(Casting)


@triton.jit
def round_to(value, pointer):
    """An fp32 value rounded to the dtype of what a pointer points at."""
    return value.to(pointer.dtype.element_ty).to(tl.float32)


# mypy: allow-untyped-defs, allow-incomplete-defs


@triton.jit
def _load_parameter(parameter_ptr, offset, columns, BLOCK: tl.constexpr):
    """A parameter in fp32, plus `offset` unless that is None."""
    column = tl.arange(0, BLOCK)
    parameter = tl.load(parameter_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    if offset is not None:
        parameter += tl.cast(offset, tl.float32)
    return parameter


@triton.jit
def _row_means(first, second, columns):
    """Means of two tiles along their rows, in one reduction."""
    return tl.split(tl.sum(tl.join(first, second), axis=1) / columns)


@triton.jit
def _widen_again(narrow):
    """`narrow` in fp32, by other instructions than `.to(tl.float32)`.

    The compiler then keeps the narrow tile in registers and not the wide one that it already made from it.
    """
    wide = narrow.to(tl.float32)
    if narrow.dtype == tl.bfloat16:
        wide = (narrow.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return wide


@triton.jit
def _norm_fwd_kernel(
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
    rows,
    columns,
    heads,
    eps,
    offset,
    CASTING: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    LONG: tl.constexpr,
):
    """Compute y = norm(x + residual) * (weight + offset) + bias: one tile per program, or several if rows are long."""
    # a casting rounds to the dtype of what is normalized
    normalized_ptr = y_ptr if residual_ptr is None else sum_ptr
    program, programs = tl.program_id(0), tl.num_programs(0)
    if heads is not None:
        head = program % heads
        program, programs = program // heads, programs // heads
        if weight_ptr is not None:
            weight_ptr += head * columns
        if bias_ptr is not None:
            bias_ptr += head * columns
    first, step = program * ROWS, programs * ROWS
    column = tl.arange(0, BLOCK)
    if LONG:
        if weight_ptr is not None:
            weight = _load_parameter(weight_ptr, offset, columns, BLOCK)
        if bias_ptr is not None:
            bias = _load_parameter(bias_ptr, None, columns, BLOCK)
    # constant bounds for the one tile of a program that does not walk: the loop disappears when the kernel is compiled
    origin, begin, end, step = (0, first, rows, step) if LONG else (first, 0, 1, 1)
    for start in tl.range(begin, end, step, num_stages=STAGES):
        row = origin + start + tl.arange(0, ROWS)
        in_rows = row < rows
        mask = in_rows[:, None] & (column < columns)[None, :]
        if heads is not None:
            row = row * heads + head
        row64 = row.to(tl.int64)[:, None]
        x = tl.load(x_ptr + row64 * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        if residual_ptr is not None:
            x += tl.load(residual_ptr + row64 * residual_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
            # normalize the rounded sum: the next layer reads that one
            total = x.to(sum_ptr.dtype.element_ty)
            tl.store(sum_ptr + row64 * columns + column[None, :], total, mask=mask)
            x = total.to(tl.float32)
        if not LONG and weight_ptr is not None:
            # after the rows, whose loads take longer
            weight = _load_parameter(weight_ptr, offset, columns, BLOCK)
        if mean_ptr is None:
            square = x * x
            if CASTING == "none":
                square = round_to(square, normalized_ptr)
            variance = tl.sum(square, axis=1) / columns
        else:
            mean = tl.sum(x, axis=1) / columns
            x = tl.where(mask, x - mean[:, None], 0.0)
            # where rows are far from zero, the sum's rounding shifts the mean by more than one rounding of the mean
            shift, square = _row_means(x, x * x, columns)
            mean += shift
            x -= shift[:, None]
            variance = tl.maximum(square - shift * shift, 0.0)
        if CASTING == "none":
            variance = round_to(variance, normalized_ptr)
        rstd = tl.rsqrt(variance + tl.cast(eps, tl.float32))
        if CASTING == "none":
            rstd = round_to(rstd, normalized_ptr)
        if mean_ptr is not None:
            tl.store(mean_ptr + row, mean, mask=in_rows)
        tl.store(rstd_ptr + row, rstd, mask=in_rows)
        y = x * rstd[:, None]
        if CASTING != "gemma":
            y = round_to(y, normalized_ptr)
        if weight_ptr is not None:
            y *= weight[None, :]
        if bias_ptr is not None:
            if not LONG:
                bias = _load_parameter(bias_ptr, None, columns, BLOCK)
            y += bias[None, :]
        tl.store(y_ptr + row64 * columns + column[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _norm_bwd_kernel(
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
    heads,
    offset,
    CASTING: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    LONG: tl.constexpr,
):
    """The gradient of what was normalized, and this program's share of the parameters' gradients.

    `sum_grad` is the gradient of the sum that forward returned; `narrow_dx` takes the gradient in a second dtype.
    """
    column = tl.arange(0, BLOCK)
    in_row = column < columns
    # LayerNorm's two sums leave no registers for the weight of a long row: it is loaded again with each row
    HAS_WEIGHT: tl.constexpr = weight_ptr is not None
    HOLD_WEIGHT: tl.constexpr = HAS_WEIGHT and (not LONG or mean_ptr is None)
    program, programs = tl.program_id(0), tl.num_programs(0)
    if heads is not None:
        head = program % heads
        program, programs = program // heads, programs // heads
        if HAS_WEIGHT:
            weight_ptr += head * columns
    if HOLD_WEIGHT:
        weight = _load_parameter(weight_ptr, offset, columns, BLOCK)
    weight_grad = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    bias_grad = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    first, step = program * ROWS, programs * ROWS
    for start in tl.range(first, rows, step, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        in_rows = row < rows
        mask = in_rows[:, None] & in_row[None, :]
        if heads is not None:
            row = row * heads + head
        row64 = row.to(tl.int64)[:, None]
        out = row64 * columns + column[None, :]
        if HAS_WEIGHT and not HOLD_WEIGHT:
            narrow_weight = tl.load(weight_ptr + column, mask=in_row, other=0.0)
            weight = narrow_weight.to(tl.float32)
        x = tl.load(x_ptr + row64 * x_stride + column[None, :], mask=mask, other=0.0)
        dy = tl.load(dy_ptr + row64 * dy_stride + column[None, :], mask=mask, other=0.0)
        mean = 0.0 if mean_ptr is None else tl.load(mean_ptr + row, mask=in_rows, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + row, mask=in_rows, other=0.0)[:, None]
        normed = (x.to(tl.float32) - mean) * rstd
        weighted = dy.to(tl.float32)
        if HAS_WEIGHT:
            weighted *= weight[None, :]
        if mean_ptr is None:
            along = (tl.sum(normed * weighted, axis=1) / columns)[:, None]
            level = 0.0
        else:
            along, level = _row_means(normed * weighted, weighted, columns)
            along, level = along[:, None], level[:, None]
        if LONG:
            normed = (_widen_again(x) - mean) * rstd
            dy = _widen_again(dy)
            weighted = dy
            if HAS_WEIGHT:
                weighted = dy * (weight if HOLD_WEIGHT else _widen_again(narrow_weight))[None, :]
        else:
            dy = dy.to(tl.float32)
        if BLOCK == 1 and mean_ptr is not None:
            # both are one product: fused into a multiply-add, their difference would be the product's rounding error
            weighted, level = 0.0, 0.0
        dx = rstd * (weighted - normed * along - level)
        if sum_grad_ptr is not None:
            dx += tl.load(sum_grad_ptr + row64 * sum_grad_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + out, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if narrow_dx_ptr is not None:
            tl.store(narrow_dx_ptr + out, dx.to(narrow_dx_ptr.dtype.element_ty), mask=mask)
        if CASTING != "gemma":
            normed = round_to(normed, x_ptr)
        weight_grad += dy * normed
        bias_grad += dy
    partial = tl.program_id(0) * columns + column
    if weight_partial_ptr is not None:
        tl.store(weight_partial_ptr + partial, tl.sum(weight_grad, axis=0), mask=in_row)
    if bias_partial_ptr is not None:
        tl.store(bias_partial_ptr + partial, tl.sum(bias_grad, axis=0), mask=in_row)


# mypy: allow-untyped-defs, allow-incomplete-defs


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
