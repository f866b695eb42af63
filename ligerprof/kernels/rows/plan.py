"""How rows that are reduced one by one are spread over programs: the one rule for norm kernels and estimator."""

from dataclasses import dataclass

from ligerprof.errors import KernelInputError

MAX_COLUMNS = 65536

# elements a program holds at a time, where it takes one tile and where it walks: narrow rows share a tile
_TILE_ELEMENTS, _WALKED_ELEMENTS = 4096, 8192
_ELEMENTS_PER_WARP = 1024
_MIN_WARPS, _MAX_WARPS = 4, 32

# tiles that a program which walks has under way: two are read ahead. One read ahead is slower than none
_STAGES = 3
# of shared memory, for what the reductions exchange
_RESERVED_BYTES = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPlan:
    """One launch over rows.

    Attributes:
        block: columns of a tile, a power of two not below the row's.
        tile_rows: rows of a tile.
        programs: as many as tiles, or fewer that walk over them, each with one row of partial sums.
        warps: warps a program.
        stages: tiles of a program that are under way at a time.
        is_long: whether rows are, see `is_long`.
    """

    block: int
    tile_rows: int
    programs: int
    warps: int
    stages: int
    is_long: bool


def plan_forward(*, rows: int, columns: int, sm_count: int, shared_bytes: int, read_bytes: int) -> RowPlan:
    """One program a tile; programs walk where a multiprocessor would hold few of them.

    Args:
        shared_bytes: shared memory that one program may use.
        read_bytes: of all that is read row by row, bytes a column.

    Raises:
        KernelInputError: rows too long for one program.
    """
    block = _block(columns)
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
    """Programs that walk over the tiles, one a multiprocessor: bytes enough under way, and few partial sums.

    Args:
        shared_bytes: shared memory that one program may use.
        read_bytes: of all that is read row by row, bytes a column.

    Raises:
        KernelInputError: rows too long for one program.
    """
    block = _block(columns)
    tile_rows = _tile_rows(block, _WALKED_ELEMENTS)
    ahead_bytes = (_STAGES - 1) * tile_rows * block * read_bytes
    reads_ahead = ahead_bytes <= shared_bytes - _RESERVED_BYTES
    return RowPlan(
        block=block,
        tile_rows=tile_rows,
        programs=backward_programs(rows=rows, columns=columns, sm_count=sm_count),
        # more warps hide the waiting where nothing is read ahead, and each thread holds less
        warps=_warps(tile_rows * block * (1 if reads_ahead else 2)),
        stages=_STAGES if reads_ahead else 1,
        is_long=is_long(columns),
    )


def backward_programs(*, rows: int, columns: int, sm_count: int) -> int:
    """Programs of the backward launch: as few as take no turn more than one a multiprocessor would.

    Raises:
        KernelInputError: rows too long for one program.
    """
    tiles = -(-rows // _tile_rows(_block(columns), _WALKED_ELEMENTS))
    turns = max(-(-tiles // sm_count), 1)
    return -(-tiles // turns)


def is_long(columns: int) -> bool:
    """Whether a row and sums over rows do not fit a program's registers in fp32."""
    return columns > _WALKED_ELEMENTS


def _block(columns: int) -> int:
    if columns > MAX_COLUMNS:
        raise KernelInputError(f"a norm over {columns} columns: the kernel takes up to {MAX_COLUMNS}.")
    return 1 << (columns - 1).bit_length()


def _tile_rows(block: int, elements: int) -> int:
    return max(1, elements // block)


def _warps(elements: int) -> int:
    return min(max(elements // _ELEMENTS_PER_WARP, _MIN_WARPS), _MAX_WARPS)
