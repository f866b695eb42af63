"""What the norm kernels share: rows as they take them, their launches, and the gradients of a norm's parameters.

N rows, D columns, P programs, S parameters that want a gradient.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from ligerprof.kernels.device import launches_early, on_device, shared_bytes, sm_count
from ligerprof.kernels.rows.plan import RowPlan, plan_backward, plan_forward

# many rows at a time: the sums wait for memory, not for bandwidth. Few registers: its programs are on the
# multiprocessors while the last rows are still walked
_BLOCK_ROWS = 128
_BLOCK_COLUMNS = 8
_WARPS = 4


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
    """Sums of partial[0] into `first`; a second slab of programs sums partial[1] into `second`.

    EARLY: this launch may have started before the one that makes the partial sums was through.
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


@triton.jit
def load_parameter(pointer, columns, BLOCK: tl.constexpr):
    """A parameter of a norm in fp32, zeros behind its end."""
    column = tl.arange(0, BLOCK)
    return tl.load(pointer + column, mask=column < columns, other=0.0).to(tl.float32)


@triton.jit
def row_means(first, second, columns):
    """Means of two tiles along their rows, in one reduction."""
    return tl.split(tl.sum(tl.join(first, second), axis=1) / columns)


@triton.jit
def widen_again(narrow):
    """`narrow` in fp32 a second time: by other instructions, so that the compiler holds it and not its wide form."""
    wide = narrow.to(tl.float32)
    if narrow.dtype == tl.bfloat16:
        wide = (narrow.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return wide


def as_rows(value: Tensor) -> Tensor:
    """All but the last axis as one; a view where the strides allow it."""
    rows = value.reshape(-1, value.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def forward_plan_for(*read: Tensor | None) -> RowPlan:
    """The forward launch over [N, D] tensors that are read row by row."""
    return plan_forward(**_sizes(read))


def backward_plan_for(*read: Tensor | None) -> RowPlan:
    """The backward launch over [N, D] tensors that are read row by row."""
    return plan_backward(**_sizes(read))


def _sizes(read: Sequence[Tensor | None]) -> dict[str, int]:
    tensors = [tensor for tensor in read if tensor is not None]
    rows, columns = tensors[0].shape
    return {
        "rows": rows,
        "columns": columns,
        "sm_count": sm_count(tensors[0].device),
        "shared_bytes": shared_bytes(tensors[0].device),
        "read_bytes": sum(tensor.element_size() for tensor in tensors),
    }


def launch(kernel: Any, plan: RowPlan, *arguments: Any) -> None:
    """Run the kernel as planned. The arguments are the kernel's own, tensors first."""
    with on_device(arguments[0]):
        kernel[(plan.programs,)](
            *arguments,
            ROWS=plan.tile_rows,
            BLOCK=plan.block,
            STAGES=plan.stages,
            LONG=plan.is_long,
            num_warps=plan.warps,
        )


class ParameterGradients:
    """Gradients of the parameters of a norm: each program of the backward launch sums up its rows, then all are added.

    Attributes:
        totals: the gradients in the parameters' dtypes, None where none is wanted; not valid before `add_up`.
        partials: [P, D] fp32 that the backward launch writes for each of them, None where none is wanted.
    """

    def __init__(self, parameters: Sequence[Tensor | None], wanted: Sequence[bool], plan: RowPlan) -> None:
        self.totals = [
            torch.empty_like(parameter) if parameter is not None and is_wanted else None
            for parameter, is_wanted in zip(parameters, wanted, strict=True)
        ]
        self._sums = [total for total in self.totals if total is not None]
        self._partial_SPD: Tensor | None = None
        self.partials: list[Tensor | None] = [None] * len(self.totals)
        if self._sums:
            sizes = (len(self._sums), plan.programs, self._sums[0].shape[0])
            self._partial_SPD = torch.empty(sizes, dtype=torch.float32, device=self._sums[0].device)
            slabs = iter(self._partial_SPD.unbind())
            self.partials = [None if total is None else next(slabs) for total in self.totals]

    def add_up(self) -> None:
        """Write the sums over the programs into `totals`."""
        if self._partial_SPD is None:
            return
        slabs, rows, columns = self._partial_SPD.shape
        early = launches_early(self._partial_SPD.device)
        with on_device(self._partial_SPD):
            _column_sums_kernel[(triton.cdiv(columns, _BLOCK_COLUMNS), slabs)](
                self._partial_SPD,
                self._sums[0],
                # never one tensor twice: compiled code gives each argument that is written a copy of its own
                self._sums[1] if slabs > 1 else None,
                rows,
                columns,
                EARLY=early,
                ROWS=_BLOCK_ROWS,
                COLUMNS=_BLOCK_COLUMNS,
                num_warps=_WARPS,
                **({"launch_pdl": True} if early else {}),
            )
