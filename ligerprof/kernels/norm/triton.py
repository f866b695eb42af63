"""RMSNorm and LayerNorm in Triton: fp32 arithmetic, one rounding, one pass over the rows in each direction.

Axes: N rows, D columns, P programs of the backward launch.

One forward and one backward kernel serve the whole family. An argument that is None compiles its part away:

    rms_norm        x, weight, offset
    add_rms_norm    x, weight, offset, residual
    layer_norm      x, weight, bias, mean
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligerprof.errors import KernelInputError
from ligerprof.kernels.device import on_device, shared_bytes, sm_count
from ligerprof.kernels.norm.parameters import ParameterGradients
from ligerprof.kernels.norm.plan import RowPlan, is_long, plan_backward, plan_forward
from ligerprof.kernels.tensors import as_rows, first_order_only, refuse_dtensors


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
    eps,
    offset,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    LONG: tl.constexpr,
):
    """Compute y = norm(x + residual) * (weight + offset) + bias: one tile per program, or several if rows are long."""
    first, step = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    column = tl.arange(0, BLOCK)
    if LONG:
        weight = _load_parameter(weight_ptr, offset, columns, BLOCK)
        if bias_ptr is not None:
            bias = _load_parameter(bias_ptr, None, columns, BLOCK)
    # constant bounds for the one tile of a program that does not walk: the loop disappears when the kernel is compiled
    origin, begin, end, step = (0, first, rows, step) if LONG else (first, 0, 1, 1)
    for start in tl.range(begin, end, step, num_stages=STAGES):
        row = origin + start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        row64 = row.to(tl.int64)[:, None]
        x = tl.load(x_ptr + row64 * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        if residual_ptr is not None:
            x += tl.load(residual_ptr + row64 * residual_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
            # normalize the rounded sum: the next layer reads that one
            total = x.to(sum_ptr.dtype.element_ty)
            tl.store(sum_ptr + row64 * columns + column[None, :], total, mask=mask)
            x = total.to(tl.float32)
        if not LONG:
            # after the rows, whose loads take longer
            weight = _load_parameter(weight_ptr, offset, columns, BLOCK)
        if mean_ptr is None:
            variance = tl.sum(x * x, axis=1) / columns
        else:
            mean = tl.sum(x, axis=1) / columns
            x = tl.where(mask, x - mean[:, None], 0.0)
            # where rows are far from zero, the sum's rounding shifts the mean by more than one rounding of the mean
            shift, square = _row_means(x, x * x, columns)
            mean += shift
            x -= shift[:, None]
            variance = tl.maximum(square - shift * shift, 0.0)
        rstd = tl.rsqrt(variance + tl.cast(eps, tl.float32))
        if mean_ptr is not None:
            tl.store(mean_ptr + row, mean, mask=row < rows)
        tl.store(rstd_ptr + row, rstd, mask=row < rows)
        y = x * rstd[:, None] * weight[None, :]
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
    offset,
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
    HOLD_WEIGHT: tl.constexpr = not LONG or mean_ptr is None
    if HOLD_WEIGHT:
        weight = _load_parameter(weight_ptr, offset, columns, BLOCK)
    weight_grad = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    bias_grad = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    first, step = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    for start in tl.range(first, rows, step, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & in_row[None, :]
        row64 = row.to(tl.int64)[:, None]
        out = row64 * columns + column[None, :]
        if not HOLD_WEIGHT:
            narrow_weight = tl.load(weight_ptr + column, mask=in_row, other=0.0)
            weight = narrow_weight.to(tl.float32)
        x = tl.load(x_ptr + row64 * x_stride + column[None, :], mask=mask, other=0.0)
        dy = tl.load(dy_ptr + row64 * dy_stride + column[None, :], mask=mask, other=0.0)
        mean = 0.0 if mean_ptr is None else tl.load(mean_ptr + row, mask=row < rows, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
        normed = (x.to(tl.float32) - mean) * rstd
        weighted = dy.to(tl.float32) * weight[None, :]
        if mean_ptr is None:
            along = (tl.sum(normed * weighted, axis=1) / columns)[:, None]
            level = 0.0
        else:
            along, level = _row_means(normed * weighted, weighted, columns)
            along, level = along[:, None], level[:, None]
        if LONG:
            normed = (_widen_again(x) - mean) * rstd
            dy = _widen_again(dy)
            weighted = dy * (weight if HOLD_WEIGHT else _widen_again(narrow_weight))[None, :]
        else:
            dy = dy.to(tl.float32)
        dx = rstd * (weighted - normed * along - level)
        if sum_grad_ptr is not None:
            dx += tl.load(sum_grad_ptr + row64 * sum_grad_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + out, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if narrow_dx_ptr is not None:
            tl.store(narrow_dx_ptr + out, dx.to(narrow_dx_ptr.dtype.element_ty), mask=mask)
        weight_grad += dy * normed
        bias_grad += dy
    partial = tl.program_id(0) * columns + column
    if weight_partial_ptr is not None:
        tl.store(weight_partial_ptr + partial, tl.sum(weight_grad, axis=0), mask=in_row)
    if bias_partial_ptr is not None:
        tl.store(bias_partial_ptr + partial, tl.sum(bias_grad, axis=0), mask=in_row)


def _row_sizes(*read_ND: Tensor | None) -> dict[str, int]:
    """Arguments of a plan, for a launch that reads these tensors row by row; the first one is not None."""
    tensors = [tensor for tensor in read_ND if tensor is not None]
    rows, columns = tensors[0].shape
    return {
        "rows": rows,
        "columns": columns,
        "sm_count": sm_count(tensors[0].device),
        "shared_bytes": shared_bytes(tensors[0].device),
        "read_bytes": sum(tensor.element_size() for tensor in tensors),
    }


def _launch(kernel: Any, plan: RowPlan, device_of: Tensor, **arguments: Any) -> None:
    with on_device(device_of):
        kernel[(plan.programs,)](
            **arguments,
            ROWS=plan.tile_rows,
            BLOCK=plan.block,
            STAGES=plan.stages,
            LONG=plan.is_long,
            num_warps=plan.warps,
        )


def _row_stride(rows_ND: Tensor | None) -> int:
    return 0 if rows_ND is None else rows_ND.stride(0)


class _Norm(torch.autograd.Function):
    """The norm of x, or of x + residual; with a residual that sum is the second result.

    `norm` is `rms` or `layernorm`; `offset` is added to the weight unless it is None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight_D: Tensor,
        bias_D: Tensor | None,
        eps: float,
        offset: float | None,
        norm: str,
    ) -> Tensor | tuple[Tensor, Tensor]:
        x_ND, residual_ND = as_rows(x), None if residual is None else as_rows(residual)
        weight_D, bias_D = weight_D.contiguous(), None if bias_D is None else bias_D.contiguous()
        rows, columns = x_ND.shape
        dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
        total = None if residual is None else torch.empty(x.shape, dtype=dtype, device=x.device)
        y = torch.empty(x.shape, dtype=dtype, device=x.device)
        mean_N = torch.empty(rows, dtype=torch.float32, device=x.device) if norm == "layernorm" else None
        rstd_N = torch.empty(rows, dtype=torch.float32, device=x.device)
        _launch(
            _norm_fwd_kernel,
            plan_forward(**_row_sizes(x_ND, residual_ND)),
            x,
            x_ptr=x_ND,
            residual_ptr=residual_ND,
            weight_ptr=weight_D,
            bias_ptr=bias_D,
            sum_ptr=total,
            y_ptr=y,
            mean_ptr=mean_N,
            rstd_ptr=rstd_N,
            x_stride=_row_stride(x_ND),
            residual_stride=_row_stride(residual_ND),
            rows=rows,
            columns=columns,
            eps=eps,
            offset=offset,
        )
        ctx.offset, ctx.shape = offset, x.shape
        ctx.dtypes = (x.dtype, None if residual is None else residual.dtype)
        # the sum itself and not a view of it: a view keeps its graph alive, and the graph would keep the view alive
        ctx.save_for_backward(x_ND if total is None else total, weight_D, bias_D, mean_N, rstd_N)
        return y if total is None else (y, total)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor, sum_grad: Tensor | None = None) -> tuple[Tensor | None, ...]:
        normalized, weight_D, bias_D, mean_N, rstd_N = ctx.saved_tensors
        normalized_ND = as_rows(normalized)
        (rows, columns), device = normalized_ND.shape, normalized_ND.device
        dy_ND, sum_grad_ND = as_rows(grad), None if sum_grad is None else as_rows(sum_grad)
        # see HOLD_WEIGHT
        weight_per_row = weight_D if mean_N is not None and is_long(columns) else None
        plan = plan_backward(**_row_sizes(dy_ND, normalized_ND, sum_grad_ND, weight_per_row))
        # both addends have the same gradient; if their dtypes differ, the narrow one gets a copy
        dx_by_dtype = {normalized_ND.dtype: torch.empty(ctx.shape, dtype=normalized_ND.dtype, device=device)}
        for dtype in ctx.dtypes:
            if dtype is not None and dtype not in dx_by_dtype:
                dx_by_dtype[dtype] = torch.empty(ctx.shape, dtype=dtype, device=device)
        dx, narrow_dx = [*dx_by_dtype.values(), None][:2]
        parameters = ParameterGradients((weight_D, bias_D), ctx.needs_input_grad[2:4], plan.programs)
        weight_partial_PD, bias_partial_PD = parameters.partials_PD
        _launch(
            _norm_bwd_kernel,
            plan,
            normalized_ND,
            dy_ptr=dy_ND,
            sum_grad_ptr=sum_grad_ND,
            x_ptr=normalized_ND,
            weight_ptr=weight_D,
            mean_ptr=mean_N,
            rstd_ptr=rstd_N,
            dx_ptr=dx,
            narrow_dx_ptr=narrow_dx,
            weight_partial_ptr=weight_partial_PD,
            bias_partial_ptr=bias_partial_PD,
            dy_stride=_row_stride(dy_ND),
            sum_grad_stride=_row_stride(sum_grad_ND),
            x_stride=_row_stride(normalized_ND),
            rows=rows,
            columns=columns,
            offset=ctx.offset,
        )
        parameters.add_up()
        x_dtype, residual_dtype = ctx.dtypes
        residual_grad = None if residual_dtype is None else dx_by_dtype[residual_dtype]
        return dx_by_dtype[x_dtype], residual_grad, *parameters.totals_D, None, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Compute x / rms(x) * (weight + offset) over the last axis of x, in x's dtype.

    The offset is 1.0 for Gemma, which stores the difference between its weights and one.

    Raises:
        KernelInputError: the weight is not [D], or the rows are too long.
    """
    _check_parameters("rms", x, weight)
    return _Norm.apply(x, None, weight, None, eps, offset, "rms")  # type: ignore[no-any-return]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """The RMSNorm of x + residual, and that sum, both in the wider of the two dtypes.

    Raises:
        KernelInputError: shapes or dtypes do not match, or the rows are too long.
    """
    _check_parameters("rms", x, weight)
    refuse_dtensors("add_rms", residual)
    if x.shape != residual.shape or torch.promote_types(x.dtype, residual.dtype) not in (x.dtype, residual.dtype):
        raise KernelInputError(
            f"add_rms: {tuple(x.shape)} {x.dtype} and a residual of {tuple(residual.shape)} {residual.dtype}"
            " cannot be added in one of their dtypes."
        )
    return _Norm.apply(x, residual, weight, None, eps, offset, "rms")  # type: ignore[no-any-return]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Compute (x - mean) / std * weight + bias over the last axis of x, in x's dtype.

    Raises:
        KernelInputError: a parameter is not [D], or the rows are too long.
    """
    _check_parameters("layernorm", x, weight, bias)
    return _Norm.apply(x, None, weight, bias, eps, None, "layernorm")  # type: ignore[no-any-return]


def _check_parameters(kernel: str, x: Tensor, *parameters: Tensor | None) -> None:
    refuse_dtensors(kernel, x, *parameters)
    for parameter in parameters:
        if parameter is not None and parameter.shape != x.shape[-1:]:
            raise KernelInputError(
                f"{kernel}: a parameter of shape {tuple(parameter.shape)} does not match rows of {x.shape[-1]}."
            )
