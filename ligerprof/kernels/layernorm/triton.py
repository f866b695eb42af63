"""LayerNorm in Triton: fp32 math, one rounding; backward walks the rows in a few programs with rows of sums each.

N rows, D columns, P programs.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ligerprof.errors import KernelInputError
from ligerprof.kernels.rows.plan import is_long
from ligerprof.kernels.rows.triton import (
    ParameterGradients,
    as_rows,
    backward_plan_for,
    forward_plan_for,
    launch,
    load_parameter,
    row_means,
    widen_again,
)


@triton.jit
def _normalize_rows(
    start,
    held_weight,
    held_bias,
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    x_stride,
    rows,
    columns,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One tile, from row `start` on; parameters that no one holds are asked for behind the rows."""
    row = start + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    row64 = row.to(tl.int64)[:, None]
    x = tl.load(x_ptr + row64 * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = load_parameter(weight_ptr, columns, BLOCK) if held_weight is None else held_weight
    mean = tl.sum(x, axis=1) / columns
    centred = tl.where(mask, x - mean[:, None], 0.0)
    # rounding of the sum leaves the mean of rows far from zero off by more than one of its own roundings
    rest, square = row_means(centred, centred * centred, columns)
    mean += rest
    centred -= rest[:, None]
    rstd = tl.rsqrt(tl.maximum(square - rest * rest, 0.0) + tl.cast(eps, tl.float32))
    tl.store(mean_ptr + row, mean, mask=row < rows)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    y = centred * rstd[:, None] * weight[None, :]
    if bias_ptr is not None:
        bias = load_parameter(bias_ptr, columns, BLOCK) if held_bias is None else held_bias
        y += bias[None, :]
    tl.store(y_ptr + row64 * columns + column[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _layer_norm_fwd_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    x_stride,
    rows,
    columns,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    LONG: tl.constexpr,
):
    first, step = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    if LONG:
        weight = load_parameter(weight_ptr, columns, BLOCK)
        bias = None if bias_ptr is None else load_parameter(bias_ptr, columns, BLOCK)
        for start in tl.range(first, rows, step, num_stages=STAGES):
            _normalize_rows(
                start,
                weight,
                bias,
                x_ptr,
                weight_ptr,
                bias_ptr,
                y_ptr,
                mean_ptr,
                rstd_ptr,
                x_stride,
                rows,
                columns,
                eps,
                ROWS,
                BLOCK,
            )
    else:
        _normalize_rows(
            first,
            None,
            None,
            x_ptr,
            weight_ptr,
            bias_ptr,
            y_ptr,
            mean_ptr,
            rstd_ptr,
            x_stride,
            rows,
            columns,
            eps,
            ROWS,
            BLOCK,
        )


@triton.jit
def _layer_norm_bwd_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    weight_partial_ptr,
    bias_partial_ptr,
    dy_stride,
    x_stride,
    rows,
    columns,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    LONG: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    in_row = column < columns
    if not LONG:
        weight = load_parameter(weight_ptr, columns, BLOCK)
    weight_grad = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    bias_grad = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    first, step = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    for start in tl.range(first, rows, step, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & in_row[None, :]
        row64 = row.to(tl.int64)[:, None]
        if LONG:
            # the sums leave no register to hold it from row to row
            narrow_weight = tl.load(weight_ptr + column, mask=in_row, other=0.0)
            weight = narrow_weight.to(tl.float32)
        x = tl.load(x_ptr + row64 * x_stride + column[None, :], mask=mask, other=0.0)
        dy = tl.load(dy_ptr + row64 * dy_stride + column[None, :], mask=mask, other=0.0)
        mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
        normed = (x.to(tl.float32) - mean) * rstd
        weighted = dy.to(tl.float32) * weight[None, :]
        along, level = row_means(normed * weighted, weighted, columns)
        if LONG:
            normed = (widen_again(x) - mean) * rstd
            dy = widen_again(dy)
            weighted = dy * widen_again(narrow_weight)[None, :]
        else:
            dy = dy.to(tl.float32)
        dx = rstd * (weighted - normed * along[:, None] - level[:, None])
        tl.store(dx_ptr + row64 * columns + column[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        weight_grad += dy * normed
        bias_grad += dy
    own = tl.program_id(0) * columns + column
    if weight_partial_ptr is not None:
        tl.store(weight_partial_ptr + own, tl.sum(weight_grad, axis=0), mask=in_row)
    if bias_partial_ptr is not None:
        tl.store(bias_partial_ptr + own, tl.sum(bias_grad, axis=0), mask=in_row)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        x_ND = as_rows(x)
        (rows, columns), y = x_ND.shape, torch.empty(x.shape, dtype=x.dtype, device=x.device)
        mean_N = torch.empty(rows, dtype=torch.float32, device=x.device)
        rstd_N = torch.empty(rows, dtype=torch.float32, device=x.device)
        launch(
            _layer_norm_fwd_kernel,
            forward_plan_for(x_ND),
            x_ND,
            weight,
            bias,
            y,
            mean_N,
            rstd_N,
            x_ND.stride(0),
            rows,
            columns,
            eps,
        )
        ctx.shape = x.shape
        ctx.save_for_backward(x_ND, weight, bias, mean_N, rstd_N)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight, bias, mean_N, rstd_N = ctx.saved_tensors
        dy_ND = as_rows(grad)
        (rows, columns), device = x_ND.shape, x_ND.device
        # the kernel reads the weight with every long row
        plan = backward_plan_for(dy_ND, x_ND, weight if is_long(columns) else None)
        dx = torch.empty(ctx.shape, dtype=x_ND.dtype, device=device)
        parameters = ParameterGradients((weight, bias), ctx.needs_input_grad[1:3], plan)
        launch(
            _layer_norm_bwd_kernel,
            plan,
            dy_ND,
            x_ND,
            weight,
            mean_N,
            rstd_N,
            dx,
            *parameters.partials,
            dy_ND.stride(0),
            x_ND.stride(0),
            rows,
            columns,
        )
        parameters.add_up()
        return dx, *parameters.totals, None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / std * weight + bias over the last axis, in x's dtype.

    Raises:
        KernelInputError: shapes that do not go together, or rows too long.
    """
    if weight.shape != x.shape[-1:] or (bias is not None and bias.shape != weight.shape):
        raise KernelInputError(f"layernorm: a weight of {tuple(weight.shape)} does not go with rows of {x.shape[-1]}.")
    return _LayerNorm.apply(x, weight, bias, eps)  # type: ignore[no-any-return]
