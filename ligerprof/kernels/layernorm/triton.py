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
from ligerprof.kernels.device import sm_count
from ligerprof.kernels.rows.plan import plan_rows
from ligerprof.kernels.rows.triton import (
    ParameterGradients,
    as_rows,
    launch_backward,
    launch_forward,
    read_again,
    row_means,
)


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
    REREAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    in_row = column < columns
    mask = (row < rows)[:, None] & in_row[None, :]
    row64 = row.to(tl.int64)[:, None]
    x = tl.load(x_ptr + row64 * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=in_row, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=1) / columns
    centred = tl.where(mask, x - mean[:, None], 0.0)
    # rounding of the sum leaves the mean of rows far from zero off by more than one of its own roundings
    rest, square = row_means(centred, centred * centred, columns)
    if REREAD:
        centred = read_again(x_ptr + row64 * x_stride + column[None, :], mask) - mean[:, None]
        weight = read_again(weight_ptr + column, in_row)
    mean += rest
    centred -= rest[:, None]
    rstd = tl.rsqrt(tl.maximum(square - rest * rest, 0.0) + tl.cast(eps, tl.float32))
    tl.store(mean_ptr + row, mean, mask=row < rows)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    y = centred * rstd[:, None] * weight[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + column, mask=in_row, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + row64 * columns + column[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


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
    REREAD: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    in_row = column < columns
    weight = tl.load(weight_ptr + column, mask=in_row, other=0.0).to(tl.float32)
    weight_grad = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    bias_grad = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    first, step = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    for start in tl.range(first, rows, step, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & in_row[None, :]
        row64 = row.to(tl.int64)[:, None]
        if REREAD:
            # the sums leave no register to hold it from row to row
            weight = tl.load(weight_ptr + column, mask=in_row, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row64 * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row64 * dy_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
        normed = tl.where(mask, (x - mean) * rstd, 0.0)
        weighted = dy * weight[None, :]
        along, level = row_means(normed * weighted, weighted, columns)
        if REREAD:
            normed = (read_again(x_ptr + row64 * x_stride + column[None, :], mask) - mean) * rstd
            dy = read_again(dy_ptr + row64 * dy_stride + column[None, :], mask)
            weight = read_again(weight_ptr + column, in_row)
            weighted = dy * weight[None, :]
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
        plan = plan_rows(rows=rows, columns=columns, sm_count=sm_count(x.device))
        launch_forward(
            _layer_norm_fwd_kernel,
            plan,
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
            plan.reread,
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
        plan = plan_rows(rows=rows, columns=columns, sm_count=sm_count(device))
        dx = torch.empty(ctx.shape, dtype=x_ND.dtype, device=device)
        parameters = ParameterGradients((weight, bias), ctx.needs_input_grad[1:3], plan)
        launch_backward(
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
