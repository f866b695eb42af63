"""RMSNorm and LayerNorm in Triton: fp32 arithmetic, one rounding, one pass over the rows in each direction.

Axes: N rows, D columns, P programs of the backward launch, each of which sums the parameters' gradients over its rows.

One forward and one backward kernel serve the whole family. An argument that is None compiles its part away:

    rms_norm        x, weight, bias, offset
    add_rms_norm    x, weight, bias, offset, residual
    layer_norm      x, weight, bias, mean
    add_layer_norm  x, weight, bias, mean, residual

If each head has a weight, programs come in groups of one per head; `rows` counts the rows of a head.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from ligerprof.errors import KernelInputError
from ligerprof.kernels.device import launches_early, on_device, shared_bytes, sm_count
from ligerprof.kernels.norm.spec import MAX_COLUMNS, RowPlan, is_long, plan_backward, plan_forward
from ligerprof.kernels.sizes import ceil_div
from ligerprof.kernels.tensors import as_rows, check_tensors, columns_of, dense_like, first_order_only, row_stride

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


# launch config of the sums over programs: many rows per step, because this kernel waits for memory latency and not for
# bandwidth. Few registers, so that its programs are resident while the backward launch walks over its last rows
_SUM_ROWS = 128
_SUM_COLUMNS = 8
_SUM_WARPS = 4


@triton.jit
def _column_sums_kernel(
    partial_ptr,
    first_ptr,
    second_ptr,
    rows,
    columns,
    EARLY: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum the rows of partial[0] into `first` and, unless it is None, those of partial[1] into `second`.

    EARLY: this launch may start before the launch that writes the partial sums has finished.
    """
    slab = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_row = column < columns
    partial_ptr += slab * rows * columns
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    if EARLY:
        gdc_wait()
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & in_row[None, :]
        total += tl.load(partial_ptr + row[:, None] * columns + column[None, :], mask=mask, other=0.0)
    sums = tl.sum(total, axis=0)
    if slab == 0:
        tl.store(first_ptr + column, sums.to(first_ptr.dtype.element_ty), mask=in_row)
    elif second_ptr is not None:
        tl.store(second_ptr + column, sums.to(second_ptr.dtype.element_ty), mask=in_row)


class ParameterGradients:
    """Buffers for the gradients of up to two parameters, and for the partial sums that they are made from.

    Attributes:
        totals_D: each parameter's gradient in the parameter's dtype, None if none is wanted; valid after `add_up`.
        partials_PD: each parameter's fp32 partial sums, which the backward launch writes; None if none are wanted.
    """

    def __init__(
        self, parameters_D: Sequence[Tensor | None], wanted: Sequence[bool], programs: int, columns: int
    ) -> None:
        self.totals_D = [
            torch.empty_like(parameter_D) if parameter_D is not None and is_wanted else None
            for parameter_D, is_wanted in zip(parameters_D, wanted, strict=True)
        ]
        written_D = [total_D for total_D in self.totals_D if total_D is not None]
        # torch.compile copies a view that a kernel writes, and torch 2.11 fails to do so if the number of heads varies:
        # there, each parameter has memory of its own
        groups = [[total_D] for total_D in written_D]
        if written_D and not torch.compiler.is_compiling():
            groups = [written_D]
        self._sums = [(_memory_for(group_D, programs * columns), group_D) for group_D in groups]
        slabs = iter([slab for memory, group_D in self._sums for slab in _slabs(memory, group_D)])
        self.partials_PD = [None if total_D is None else next(slabs) for total_D in self.totals_D]

    def add_up(self) -> None:
        """Write the sums over the programs into `totals_D`."""
        for memory, written_D in self._sums:
            programs, columns = memory.shape[-2:]
            early = launches_early(memory.device)
            with on_device(memory):
                _column_sums_kernel[(ceil_div(columns, _SUM_COLUMNS), len(written_D))](
                    partial_ptr=memory,
                    first_ptr=written_D[0],
                    # None and not the first one again: torch.compile copies each argument that a kernel writes
                    second_ptr=written_D[1] if len(written_D) > 1 else None,
                    rows=programs,
                    columns=columns,
                    EARLY=early,
                    ROWS=_SUM_ROWS,
                    COLUMNS=_SUM_COLUMNS,
                    num_warps=_SUM_WARPS,
                    **({"launch_pdl": True} if early else {}),
                )


def _memory_for(totals_D: list[Tensor], elements: int) -> Tensor:
    """Memory for so many partial sums of each parameter, in slabs if there are several parameters."""
    first_D = totals_D[0]
    # one row for the programs of all heads, if each head has a weight
    sizes = [elements // first_D.numel(), first_D.numel()]
    several = [len(totals_D)] if len(totals_D) > 1 else []
    return torch.empty(several + sizes, dtype=torch.float32, device=first_D.device)


def _slabs(memory: Tensor, totals_D: list[Tensor]) -> Sequence[Tensor]:
    return memory.unbind() if len(totals_D) > 1 else [memory]


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
