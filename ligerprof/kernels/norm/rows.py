"""The norm kernels of rows that a program holds whole: one tile of rows per program, or several in turn.

Axes: N rows, D columns, P programs of the backward launch. See `triton` for arguments that are None.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Literal, get_args

import triton
import triton.language as tl

Casting = Literal["gemma", "llama", "none"]
CASTINGS: tuple[str, ...] = get_args(Casting)


@triton.jit
def round_to(value, pointer):
    """An fp32 value rounded to the dtype of what a pointer points at."""
    return value.to(pointer.dtype.element_ty).to(tl.float32)


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
