"""RMSNorm in Triton, alone or with the residual addition before it: fp32 math, one rounding, one pass each way.

Backward walks the rows in a few programs with a row of partial sums each. N rows, D columns, P programs.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ligerprof.errors import KernelInputError
from ligerprof.kernels.rows.triton import (
    ParameterGradients,
    as_rows,
    backward_plan_for,
    forward_plan_for,
    launch,
    load_parameter,
    widen_again,
)


@triton.jit
def _load_weight(weight_ptr, offset, columns, BLOCK: tl.constexpr):
    return load_parameter(weight_ptr, columns, BLOCK) + tl.cast(offset, tl.float32)


@triton.jit
def _normalize_rows(
    start,
    held_weight,
    x_ptr,
    residual_ptr,
    weight_ptr,
    sum_ptr,
    y_ptr,
    rstd_ptr,
    x_stride,
    residual_stride,
    rows,
    columns,
    eps,
    offset,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One tile, from row `start` on; a weight that no one holds is asked for behind the rows."""
    row = start + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    row64 = row.to(tl.int64)[:, None]
    out = row64 * columns + column[None, :]
    x = tl.load(x_ptr + row64 * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + row64 * residual_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        # what is normalized is the sum that the next layer will read
        total = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + out, total, mask=mask)
        x = total.to(tl.float32)
    weight = _load_weight(weight_ptr, offset, columns, BLOCK) if held_weight is None else held_weight
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / columns + tl.cast(eps, tl.float32))
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    y = x * rstd[:, None] * weight[None, :]
    tl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rms_fwd_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    sum_ptr,
    y_ptr,
    rstd_ptr,
    x_stride,
    residual_stride,
    rows,
    columns,
    eps,
    offset,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    LONG: tl.constexpr,
):
    first, step = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    if LONG:
        weight = _load_weight(weight_ptr, offset, columns, BLOCK)
        for start in tl.range(first, rows, step, num_stages=STAGES):
            _normalize_rows(
                start,
                weight,
                x_ptr,
                residual_ptr,
                weight_ptr,
                sum_ptr,
                y_ptr,
                rstd_ptr,
                x_stride,
                residual_stride,
                rows,
                columns,
                eps,
                offset,
                ROWS,
                BLOCK,
            )
    else:
        _normalize_rows(
            first,
            None,
            x_ptr,
            residual_ptr,
            weight_ptr,
            sum_ptr,
            y_ptr,
            rstd_ptr,
            x_stride,
            residual_stride,
            rows,
            columns,
            eps,
            offset,
            ROWS,
            BLOCK,
        )


@triton.jit
def _rms_bwd_kernel(
    dy_ptr,
    sum_grad_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    narrow_ptr,
    partial_ptr,
    dy_stride,
    sum_grad_stride,
    x_stride,
    rows,
    columns,
    offset,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    LONG: tl.constexpr,
):
    """The gradient of what was normalized; `narrow` is the same in another dtype."""
    column = tl.arange(0, BLOCK)
    in_row = column < columns
    weight = _load_weight(weight_ptr, offset, columns, BLOCK)
    weight_grad = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    first, step = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    for start in tl.range(first, rows, step, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & in_row[None, :]
        row64 = row.to(tl.int64)[:, None]
        out = row64 * columns + column[None, :]
        x = tl.load(x_ptr + row64 * x_stride + column[None, :], mask=mask, other=0.0)
        dy = tl.load(dy_ptr + row64 * dy_stride + column[None, :], mask=mask, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
        normed = x.to(tl.float32) * rstd
        weighted = dy.to(tl.float32) * weight[None, :]
        along = tl.sum(normed * weighted, axis=1)[:, None] / columns
        if LONG:
            normed = widen_again(x) * rstd
            dy = widen_again(dy)
            weighted = dy * weight[None, :]
        else:
            dy = dy.to(tl.float32)
        dx = rstd * (weighted - normed * along)
        if sum_grad_ptr is not None:
            dx += tl.load(sum_grad_ptr + row64 * sum_grad_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + out, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if narrow_ptr is not None:
            tl.store(narrow_ptr + out, dx.to(narrow_ptr.dtype.element_ty), mask=mask)
        weight_grad += dy * normed
    if partial_ptr is not None:
        tl.store(partial_ptr + tl.program_id(0) * columns + column, tl.sum(weight_grad, axis=0), mask=in_row)


class _RMSNorm(torch.autograd.Function):
    """RMSNorm of x, or of x + residual, which then is the second result."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float
    ) -> Tensor | tuple[Tensor, Tensor]:
        x_ND = as_rows(x)
        rows, columns = x_ND.shape
        dtype, device = x.dtype, x.device
        residual_ND = total = None
        if residual is not None:
            residual_ND, dtype = as_rows(residual), torch.promote_types(x.dtype, residual.dtype)
            total = torch.empty(x.shape, dtype=dtype, device=device)
        y = torch.empty(x.shape, dtype=dtype, device=device)
        rstd_N = torch.empty(rows, dtype=torch.float32, device=device)
        launch(
            _rms_fwd_kernel,
            forward_plan_for(x_ND, residual_ND),
            x_ND,
            residual_ND,
            weight,
            total,
            y,
            rstd_N,
            x_ND.stride(0),
            0 if residual_ND is None else residual_ND.stride(0),
            rows,
            columns,
            eps,
            offset,
        )
        ctx.offset, ctx.shape = offset, x.shape
        ctx.dtypes = (x.dtype, None if residual is None else residual.dtype)
        # the result itself and no view of it: a view would hold its graph, and the graph the view
        ctx.save_for_backward(x_ND if total is None else total, weight, rstd_N)
        return y if total is None else (y, total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, sum_grad: Tensor | None = None) -> tuple[Tensor | None, ...]:
        normed, weight, rstd_N = ctx.saved_tensors
        normed_ND = as_rows(normed)
        (rows, columns), device = normed_ND.shape, normed_ND.device
        dy_ND, sum_grad_ND = as_rows(grad), None if sum_grad is None else as_rows(sum_grad)
        plan = backward_plan_for(dy_ND, normed_ND, sum_grad_ND)
        gradients = {normed_ND.dtype: torch.empty(ctx.shape, dtype=normed_ND.dtype, device=device)}
        for dtype in ctx.dtypes:
            if dtype is not None and dtype not in gradients:
                gradients[dtype] = torch.empty(ctx.shape, dtype=dtype, device=device)
        dx, narrow = [*gradients.values(), None][:2]
        parameters = ParameterGradients((weight,), (ctx.needs_input_grad[2],), plan)
        launch(
            _rms_bwd_kernel,
            plan,
            dy_ND,
            sum_grad_ND,
            normed_ND,
            weight,
            rstd_N,
            dx,
            narrow,
            *parameters.partials,
            dy_ND.stride(0),
            0 if sum_grad_ND is None else sum_grad_ND.stride(0),
            normed_ND.stride(0),
            rows,
            columns,
            ctx.offset,
        )
        parameters.add_up()
        x_dtype, residual_dtype = ctx.dtypes
        residual_grad = None if residual_dtype is None else gradients[residual_dtype]
        return gradients[x_dtype], residual_grad, *parameters.totals, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """X / rms(x) * (weight + offset) over the last axis, in x's dtype.

    Args:
        offset: 1.0 for Gemma, whose weights are stored as the difference from one.

    Raises:
        KernelInputError: shapes that do not go together, or rows too long.
    """
    _check_weight(x, weight)
    return _RMSNorm.apply(x, None, weight, eps, offset)  # type: ignore[no-any-return]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """The RMSNorm of x + residual, and that sum, both in the wider of the two dtypes.

    Raises:
        KernelInputError: shapes or dtypes that do not go together, or rows too long.
    """
    _check_weight(x, weight)
    if x.shape != residual.shape or torch.promote_types(x.dtype, residual.dtype) not in (x.dtype, residual.dtype):
        raise KernelInputError(
            f"add_rms: {tuple(x.shape)} {x.dtype} and a residual of {tuple(residual.shape)} {residual.dtype}"
            " cannot be added in one of their dtypes."
        )
    return _RMSNorm.apply(x, residual, weight, eps, offset)  # type: ignore[no-any-return]


def _check_weight(x: Tensor, weight: Tensor) -> None:
    if weight.shape != x.shape[-1:]:
        raise KernelInputError(f"rms: a weight of {tuple(weight.shape)} does not go with rows of {x.shape[-1]}.")
