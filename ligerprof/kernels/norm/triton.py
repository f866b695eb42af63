"""RMSNorm and LayerNorm in Triton: fp32 arithmetic, one rounding, one pass over the rows in each direction.

Axes: N rows, D columns, P programs of the backward launch.

One forward and one backward kernel serve the whole family. An argument that is None compiles its part away:

    rms_norm        x, weight, bias, offset
    add_rms_norm    x, weight, bias, offset, residual
    layer_norm      x, weight, bias, mean
    add_layer_norm  x, weight, bias, mean, residual

If each head has a weight, programs come in groups of one per head; `rows` counts the rows of a head.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

import torch
from torch import Tensor

from ligerprof.errors import KernelInputError
from ligerprof.kernels.device import on_device, shared_bytes, sm_count
from ligerprof.kernels.norm.parameters import ParameterGradients
from ligerprof.kernels.norm.rows import (
    CASTINGS,
    Casting,
    _norm_bwd_kernel,
    _norm_fwd_kernel,
)
from ligerprof.kernels.norm.spec import MAX_COLUMNS, RowPlan, is_long, plan_backward, plan_forward
from ligerprof.kernels.tensors import as_rows, check_tensors, columns_of, dense_like, first_order_only, row_stride


def _row_sizes(columns: int, heads: int | None, *read_ND: Tensor | None) -> dict[str, int]:
    """Arguments of a plan, for a launch that reads these tensors row by row; the first one is not None.

    If each head has a weight, the plan is that of one head's programs.
    """
    tensors = [tensor for tensor in read_ND if tensor is not None]
    groups = heads or 1
    return {
        "rows": tensors[0].size(0) // groups,
        "columns": columns,
        "sm_count": max(sm_count(tensors[0].device) // groups, 1),
        "shared_bytes": shared_bytes(tensors[0].device),
        "read_bytes": sum(tensor.element_size() for tensor in tensors),
    }


def _launch(kernel: Any, plan: RowPlan, device_of: Tensor, heads: int | None, **arguments: Any) -> None:
    with on_device(device_of):
        kernel[(plan.programs * (heads or 1),)](
            **arguments,
            heads=heads,
            ROWS=plan.tile_rows,
            BLOCK=plan.block,
            STAGES=plan.stages,
            LONG=plan.is_long,
            num_warps=plan.warps,
        )


class _Norm(torch.autograd.Function):
    """The norm of x, or of x + residual; with a residual that sum is the second result.

    `norm` is `rms` or `layernorm`; `offset` is added to the weight unless it is None; `dtype` is that of the sum.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight_D: Tensor | None,
        bias_D: Tensor | None,
        eps: float,
        offset: float | None,
        norm: str,
        casting: Casting,
        sum_dtype: torch.dtype | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        x_ND, residual_ND = as_rows(x), None if residual is None else as_rows(residual)
        weight_D = None if weight_D is None else weight_D.contiguous()
        bias_D = None if bias_D is None else bias_D.contiguous()
        rows, columns = x_ND.size(0), columns_of(x)
        heads = _heads(weight_D, bias_D)
        dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
        total = None if residual is None else dense_like(x, sum_dtype or dtype)
        y = dense_like(x, dtype)
        mean_N = torch.empty(rows, dtype=torch.float32, device=x.device) if norm == "layernorm" else None
        rstd_N = torch.empty(rows, dtype=torch.float32, device=x.device)
        arguments = {
            "x_ptr": x_ND,
            "residual_ptr": residual_ND,
            "weight_ptr": weight_D,
            "bias_ptr": bias_D,
            "sum_ptr": total,
            "y_ptr": y,
            "mean_ptr": mean_N,
            "rstd_ptr": rstd_N,
            "x_stride": row_stride(x_ND, columns),
            "residual_stride": row_stride(residual_ND, columns),
            "columns": columns,
            "eps": eps,
            "offset": offset,
            "CASTING": casting,
        }
        plan = plan_forward(**_row_sizes(columns, heads, x_ND, residual_ND))
        _launch(_norm_fwd_kernel, plan, x, heads, rows=rows // (heads or 1), **arguments)
        ctx.offset, ctx.casting = offset, casting
        # Dynamo has no symbol for the stride of a saved tensor whose rows change in length
        ctx.traced_stride = arguments["x_stride"] if total is None else columns
        ctx.dtypes = (x.dtype, None if residual is None else residual.dtype)
        # the sum itself and not a view of it: a view keeps its graph alive, and the graph would keep the view alive
        ctx.save_for_backward(x_ND if total is None else total, weight_D, bias_D, mean_N, rstd_N)
        return y if total is None else (y, total)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor, sum_grad: Tensor | None = None) -> tuple[Tensor | None, ...]:
        normalized, weight_D, bias_D, mean_N, rstd_N = ctx.saved_tensors
        normalized_ND = as_rows(normalized)
        rows, columns = normalized_ND.size(0), columns_of(normalized)
        heads = _heads(weight_D, bias_D)
        dy_ND, sum_grad_ND = as_rows(grad), None if sum_grad is None else as_rows(sum_grad)
        # see HOLD_WEIGHT
        weight_per_row = weight_D if mean_N is not None and is_long(columns) else None
        plan = plan_backward(**_row_sizes(columns, heads, dy_ND, normalized_ND, sum_grad_ND, weight_per_row))
        # both addends have the same gradient; if their dtypes differ, the second one gets a copy
        dx_by_dtype = {
            dtype: dense_like(grad, dtype)
            for dtype in dict.fromkeys((normalized_ND.dtype, *ctx.dtypes))
            if dtype in ctx.dtypes and dtype is not None
        }
        dx, narrow_dx = [*dx_by_dtype.values(), None][:2]
        programs = plan.programs * (heads or 1)
        parameters = ParameterGradients((weight_D, bias_D), ctx.needs_input_grad[2:4], programs, columns)
        weight_partial_PD, bias_partial_PD = parameters.partials_PD
        arguments = {
            "dy_ptr": dy_ND,
            "sum_grad_ptr": sum_grad_ND,
            "x_ptr": normalized_ND,
            "weight_ptr": weight_D,
            "mean_ptr": mean_N,
            "rstd_ptr": rstd_N,
            "dx_ptr": dx,
            "narrow_dx_ptr": narrow_dx,
            "weight_partial_ptr": weight_partial_PD,
            "bias_partial_ptr": bias_partial_PD,
            "dy_stride": row_stride(dy_ND, columns),
            "sum_grad_stride": row_stride(sum_grad_ND, columns),
            "x_stride": ctx.traced_stride if torch.compiler.is_compiling() else row_stride(normalized_ND, columns),
            "rows": rows // (heads or 1),
            "columns": columns,
            "offset": ctx.offset,
            "CASTING": ctx.casting,
        }
        _launch(_norm_bwd_kernel, plan, normalized_ND, heads, **arguments)
        parameters.add_up()
        x_dtype, residual_dtype = ctx.dtypes
        residual_grad = None if residual_dtype is None else dx_by_dtype[residual_dtype]
        return dx_by_dtype[x_dtype], residual_grad, *parameters.totals_D, *[None] * 5


def _heads(*parameters: Tensor | None) -> int | None:
    """The number of heads, if each has a weight or bias; None if all rows share one."""
    return next((value.shape[0] for value in parameters if value is not None and value.ndim > 1), None)


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float = 0.0,
    *,
    bias: Tensor | None = None,
    casting: Casting = "gemma",
) -> Tensor:
    """Compute x / rms(x) * (weight + offset) + bias over the last axis of x, in x's dtype.

    The offset is 1.0 for Gemma, which stores the difference between its weights and one.

    Args:
        weight: [D]; [H, D] if each head of x [..., H, D] has a weight; or None.
        bias: shaped like the weight, or None.
        casting: what is rounded to x's dtype: `gemma`: the result; `llama`: also the normalized row, before the weight;
            `none`: also the squares, their mean and the root.

    Raises:
        KernelInputError: the shapes do not match, or the casting is unknown.
    """
    _check_parameters("rms", x, weight, bias)
    _check_casting(casting)
    return _Norm.apply(x, None, weight, bias, eps, offset, "rms", casting, None)  # type: ignore[no-any-return]


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float = 0.0,
    *,
    bias: Tensor | None = None,
    casting: Casting = "gemma",
    sum_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The RMSNorm of x + residual, and that sum, both in the wider of the two dtypes.

    Args:
        weight: see `rms_norm`, as for bias and casting, which rounds to the sum's dtype.
        sum_dtype: another dtype of the sum; the norm is that of the sum in this dtype.

    Raises:
        KernelInputError: shapes or dtypes do not match, or the casting is unknown.
    """
    _check_parameters("add_rms", x, weight, bias, residual=residual)
    _check_casting(casting)
    return _Norm.apply(x, residual, weight, bias, eps, offset, "rms", casting, sum_dtype)  # type: ignore[no-any-return]


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Compute (x - mean) / std * weight + bias over the last axis of x, in x's dtype.

    Args:
        weight: [D]; [H, D] if each head of x [..., H, D] has a weight; or None.
        bias: shaped like the weight, or None.

    Raises:
        KernelInputError: the shapes do not match.
    """
    _check_parameters("layernorm", x, weight, bias)
    return _Norm.apply(x, None, weight, bias, eps, None, "layernorm", "gemma", None)  # type: ignore[no-any-return]


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    sum_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The LayerNorm of x + residual, and that sum, both in the wider of the two dtypes.

    Args:
        weight: see `layer_norm`, as for bias.
        sum_dtype: see `add_rms_norm`.

    Raises:
        KernelInputError: shapes or dtypes do not match.
    """
    _check_parameters("add_layernorm", x, weight, bias, residual=residual)
    return _Norm.apply(x, residual, weight, bias, eps, None, "layernorm", "gemma", sum_dtype)  # type: ignore[no-any-return]


def _check_parameters(kernel: str, x: Tensor, *parameters: Tensor | None, residual: Tensor | None = None) -> None:
    check_tensors(kernel, x, residual, *parameters)
    if x.shape[-1] > MAX_COLUMNS:
        raise KernelInputError(
            f"{kernel}: rows have {x.shape[-1]} columns, more than {MAX_COLUMNS}. Use the provider torch (plain torch)."
        )
    given = [parameter for parameter in parameters if parameter is not None]
    for parameter in given:
        per_head = parameter.ndim == 2 and parameter.shape == x.shape[-2:]
        if parameter.shape != x.shape[-1:] and not per_head:
            raise KernelInputError(
                f"{kernel}: a parameter of shape {tuple(parameter.shape)} does not match rows of {x.shape[-1]}."
            )
    if len({parameter.ndim for parameter in given}) > 1:
        raise KernelInputError(f"{kernel}: only one of weight and bias has a row per head. Expand the other one.")
    if residual is None:
        return
    if x.shape != residual.shape or torch.promote_types(x.dtype, residual.dtype) not in (x.dtype, residual.dtype):
        raise KernelInputError(
            f"{kernel}: {tuple(x.shape)} {x.dtype} and a residual of {tuple(residual.shape)} {residual.dtype}"
            " cannot be added in one of their dtypes."
        )


def _check_casting(casting: str) -> None:
    if casting not in CASTINGS:
        raise KernelInputError(f"rms: unknown casting {casting!r}. Known: {', '.join(CASTINGS)}.")
