"""Rows as kernels take them, and the adding up of partial sums that a backward's programs leave.

P programs, D columns.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl
from torch import Tensor

from ligerprof.kernels.device import on_device

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
    else:
        tl.store(second_ptr + column, sums.to(second_ptr.dtype.element_ty), mask=in_row)


def as_rows(value: Tensor) -> Tensor:
    """All but the last axis as one; a view where the strides allow it."""
    rows = value.reshape(-1, value.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def add_partial_sums(partial_SPD: Tensor, first_D: Tensor, second_D: Tensor | None = None) -> None:
    """Write the sums over P of the first slab, and of the second where there is one.

    Args:
        partial_SPD: [slabs, P, D] fp32, one or two slabs.
    """
    slabs, rows, columns = partial_SPD.shape
    with on_device(partial_SPD):
        _column_sums_kernel[(triton.cdiv(columns, _BLOCK_COLUMNS), slabs)](
            partial_SPD,
            first_D,
            first_D if second_D is None else second_D,
            rows,
            columns,
            ROWS=_BLOCK_ROWS,
            COLUMNS=_BLOCK_COLUMNS,
            num_warps=_WARPS,
        )
