"""Gradients of a norm's parameters: the sum of what each program of the backward launch summed over its own rows.

Axes: P programs of the backward launch, D columns, S parameters that want a gradient.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from ligerprof.kernels.device import launches_early, on_device
from ligerprof.kernels.sizes import ceil_div

# launch config: many rows per step, because this kernel waits for memory latency and not for bandwidth. Few registers,
# so that its programs are resident while the backward launch walks over its last rows
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
                _column_sums_kernel[(ceil_div(columns, _BLOCK_COLUMNS), len(written_D))](
                    partial_ptr=memory,
                    first_ptr=written_D[0],
                    # None and not the first one again: torch.compile copies each argument that a kernel writes
                    second_ptr=written_D[1] if len(written_D) > 1 else None,
                    rows=programs,
                    columns=columns,
                    EARLY=early,
                    ROWS=_BLOCK_ROWS,
                    COLUMNS=_BLOCK_COLUMNS,
                    num_warps=_WARPS,
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
