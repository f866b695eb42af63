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
from ligerprof.kernels.device import on_device, sm_count
from ligerprof.kernels.rows.plan import plan_rows
from ligerprof.kernels.rows.triton import add_partial_sums, as_rows


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
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    in_row = column < columns
    mask = (row < rows)[:, None] & in_row[None, :]
    row64 = row.to(tl.int64)[:, None]
    x = tl.load(x_ptr + row64 * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=1) / columns
    centred = tl.where(mask, x - mean[:, None], 0.0)
    # rounding of the sum leaves the mean of rows far from zero off by more than one of its own roundings
    rest = tl.sum(centred, axis=1) / columns
    variance = tl.maximum(tl.sum(centred * centred, axis=1) / columns - rest * rest, 0.0)
    mean += rest
    centred -= rest[:, None]
    rstd = tl.rsqrt(variance + tl.cast(eps, tl.float32))
    tl.store(mean_ptr + row, mean, mask=row < rows)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    weight = tl.load(weight_ptr + column, mask=in_row, other=0.0).to(tl.float32)
    y = centred * rstd[:, None] * weight[None, :]
    if HAS_BIAS:
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
    partial_ptr,
    dy_stride,
    x_stride,
    rows,
    columns,
    WEIGHT_GRAD: tl.constexpr,
    BIAS_GRAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
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
        x = tl.load(x_ptr + row64 * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row64 * dy_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
        normed = tl.where(mask, (x - mean) * rstd, 0.0)
        weighted = dy * weight[None, :]
        along = tl.sum(normed * weighted, axis=1)[:, None] / columns
        level = tl.sum(weighted, axis=1)[:, None] / columns
        dx = rstd * (weighted - normed * along - level)
        tl.store(dx_ptr + row64 * columns + column[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if WEIGHT_GRAD:
            weight_grad += dy * normed
        if BIAS_GRAD:
            bias_grad += dy
    partial_ptr += tl.program_id(0) * columns
    if WEIGHT_GRAD:
        tl.store(partial_ptr + column, tl.sum(weight_grad, axis=0), mask=in_row)
        partial_ptr += tl.num_programs(0) * columns
    if BIAS_GRAD:
        tl.store(partial_ptr + column, tl.sum(bias_grad, axis=0), mask=in_row)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        x_ND = as_rows(x)
        (rows, columns), y = x_ND.shape, torch.empty(x.shape, dtype=x.dtype, device=x.device)
        mean_N = torch.empty(rows, dtype=torch.float32, device=x.device)
        rstd_N = torch.empty(rows, dtype=torch.float32, device=x.device)
        plan = plan_rows(rows=rows, columns=columns, sm_count=sm_count(x.device))
        with on_device(x):
            _layer_norm_fwd_kernel[(triton.cdiv(rows, plan.tile_rows),)](
                x_ND,
                weight,
                weight if bias is None else bias,
                y,
                mean_N,
                rstd_N,
                x_ND.stride(0),
                rows,
                columns,
                eps,
                HAS_BIAS=bias is not None,
                ROWS=plan.tile_rows,
                BLOCK=plan.block,
                num_warps=plan.warps,
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
        dx = torch.empty(ctx.shape, dtype=x_ND.dtype, device=device)
        wanted = [
            torch.empty(columns, dtype=parameter.dtype, device=device) if needed else None
            for parameter, needed in zip((weight, bias), ctx.needs_input_grad[1:3], strict=True)
        ]
        sums = [gradient for gradient in wanted if gradient is not None]
        plan = plan_rows(rows=rows, columns=columns, sm_count=sm_count(device))
        partial = rstd_N
        if sums:
            partial = torch.empty(len(sums), plan.programs, columns, dtype=torch.float32, device=device)
        with on_device(x_ND):
            _layer_norm_bwd_kernel[(plan.programs,)](
                dy_ND,
                x_ND,
                weight,
                mean_N,
                rstd_N,
                dx,
                partial,
                dy_ND.stride(0),
                x_ND.stride(0),
                rows,
                columns,
                WEIGHT_GRAD=wanted[0] is not None,
                BIAS_GRAD=wanted[1] is not None,
                ROWS=plan.tile_rows,
                BLOCK=plan.block,
                STAGES=plan.stages,
                num_warps=plan.warps,
            )
        if sums:
            add_partial_sums(partial, *sums)
        return dx, *wanted, None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / std * weight + bias over the last axis, in x's dtype.

    Raises:
        KernelInputError: shapes that do not go together, or rows too long.
    """
    if weight.shape != x.shape[-1:] or (bias is not None and bias.shape != weight.shape):
        raise KernelInputError(f"layernorm: a weight of {tuple(weight.shape)} does not go with rows of {x.shape[-1]}.")
    return _LayerNorm.apply(x, weight, bias, eps)  # type: ignore[no-any-return]
