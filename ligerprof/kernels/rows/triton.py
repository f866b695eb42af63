"""What the norm kernels share: rows as they take them, their launch, and the gradients of a norm's parameters.

N rows, D columns, P programs, S parameters that want a gradient.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligerprof.kernels.device import on_device
from ligerprof.kernels.rows.plan import RowPlan

# many rows at a time: the sums wait for memory, not for bandwidth
_BLOCK_ROWS = 256
_BLOCK_COLUMNS = 16
_WARPS = 8


@triton.jit
def _column_sums_kernel(partial_ptr, first_ptr, second_ptr, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums of partial[0] into `first`; a second slab of programs sums partial[1] into `second`."""
    slab = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_row = column < columns
    partial_ptr += slab * rows * columns
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
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
def row_means(first, second, columns):
    """Means of two tiles along their rows, in one reduction."""
    return tl.split(tl.sum(tl.join(first, second), axis=1) / columns)


@triton.jit
def read_again(pointers, mask):
    """What an earlier load brought, in fp32: its other policy keeps the compiler from holding that one's registers."""
    return tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)


def as_rows(value: Tensor) -> Tensor:
    """All but the last axis as one; a view where the strides allow it."""
    rows = value.reshape(-1, value.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def launch_forward(kernel: Any, plan: RowPlan, *arguments: Any) -> None:
    """One program a tile. The arguments are the kernel's own, tensors first."""
    with on_device(arguments[0]):
        kernel[(plan.tiles,)](*arguments, ROWS=plan.tile_rows, BLOCK=plan.block, num_warps=plan.forward_warps)


def launch_backward(kernel: Any, plan: RowPlan, *arguments: Any) -> None:
    """As many programs as have a row of partial sums; each walks over its tiles."""
    with on_device(arguments[0]):
        kernel[(plan.programs,)](
            *arguments,
            ROWS=plan.tile_rows,
            BLOCK=plan.block,
            STAGES=plan.stages,
            REREAD=plan.reread,
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
        with on_device(self._partial_SPD):
            _column_sums_kernel[(triton.cdiv(columns, _BLOCK_COLUMNS), slabs)](
                self._partial_SPD,
                self._sums[0],
                # never one tensor twice: compiled code gives each argument that is written a copy of its own
                self._sums[1] if slabs > 1 else None,
                rows,
                columns,
                ROWS=_BLOCK_ROWS,
                COLUMNS=_BLOCK_COLUMNS,
                num_warps=_WARPS,
            )
