"""Decide how the norm kernels spread rows over programs; the kernels and their memory specs share this plan."""

from dataclasses import dataclass

from ligerprof.kernels.sizes import next_power_of_2

# columns of a row that a program holds at a time; longer rows are read piece by piece, more than once
MAX_HELD_COLUMNS = 65536

# elements of a tile: for a program that takes one tile, and for one that walks over several
_TILE_ELEMENTS, _WALKED_ELEMENTS = 4096, 8192
_ELEMENTS_PER_WARP = 1024
_MIN_WARPS, _MAX_WARPS = 4, 32

# tiles in flight in a program that walks: two are prefetched. Prefetching only one is slower than prefetching none
_STAGES = 3
# shared memory that the reductions need
_RESERVED_BYTES = 2048
# of the mean and the reciprocal deviation of a row, which are prefetched with it
_STATISTICS_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPlan:
    """One launch over rows.

    Attributes:
        block: columns per tile: the row's, rounded up to a power of two.
        tile_rows: rows per tile.
        programs: one per tile, or fewer that walk over the tiles; each of those has its own partial sums.
        warps: warps per program.
        stages: tiles in flight per program.
        is_long: see `is_long`.
    """

    block: int
    tile_rows: int
    programs: int
    warps: int
    stages: int
    is_long: bool


def plan_forward(*, rows: int, columns: int, sm_count: int, shared_bytes: int, read_bytes: int) -> RowPlan:
    """One program per tile; long rows are walked as in backward, since only a few fit a multiprocessor.

    The arguments are those of `plan_backward`.
    """
    block = next_power_of_2(columns)
    if is_long(columns):
        return plan_backward(
            rows=rows, columns=columns, sm_count=sm_count, shared_bytes=shared_bytes, read_bytes=read_bytes
        )
    tile_rows = _tile_rows(block, _TILE_ELEMENTS)
    return RowPlan(
        block=block,
        tile_rows=tile_rows,
        programs=-(-rows // tile_rows),
        warps=_warps(tile_rows * block),
        stages=1,
        is_long=False,
    )


def plan_backward(*, rows: int, columns: int, sm_count: int, shared_bytes: int, read_bytes: int) -> RowPlan:
    """Programs that walk over the tiles, one per multiprocessor: enough bytes in flight, and few partial sums.

    Args:
        shared_bytes: shared memory available to one program.
        read_bytes: bytes per column, summed over the tensors that are read row by row.
    """
    block = next_power_of_2(columns)
    tile_rows = _tile_rows(block, _WALKED_ELEMENTS)
    prefetched_bytes = (_STAGES - 1) * tile_rows * (block * read_bytes + _STATISTICS_BYTES)
    prefetches = prefetched_bytes <= shared_bytes - _RESERVED_BYTES
    return RowPlan(
        block=block,
        tile_rows=tile_rows,
        programs=backward_programs(rows=rows, columns=columns, sm_count=sm_count),
        # without prefetching, more warps hide the latency of the loads, and each thread holds less
        warps=_warps(tile_rows * block * (1 if prefetches else 2)),
        stages=_STAGES if prefetches else 1,
        is_long=is_long(columns),
    )


def backward_programs(*, rows: int, columns: int, sm_count: int) -> int:
    """Programs of the backward launch: the fewest that finish in as many turns as one per multiprocessor would."""
    tiles = -(-rows // _tile_rows(next_power_of_2(columns), _WALKED_ELEMENTS))
    turns = max(-(-tiles // sm_count), 1)
    return -(-tiles // turns)


def is_long(columns: int) -> bool:
    """Whether a row and the sums over rows exceed a program's registers in fp32."""
    return columns > _WALKED_ELEMENTS


def comes_in_pieces(columns: int) -> bool:
    """Whether a program reads a row piece by piece."""
    return columns > MAX_HELD_COLUMNS


def _tile_rows(block: int, elements: int) -> int:
    return max(1, elements // block)


def _warps(elements: int) -> int:
    return min(max(elements // _ELEMENTS_PER_WARP, _MIN_WARPS), _MAX_WARPS)
