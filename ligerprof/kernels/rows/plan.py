"""How rows that are reduced one by one are spread over programs: the one rule for norm kernels and estimator."""

from dataclasses import dataclass

from ligerprof.errors import KernelInputError

# elements a program holds at a time: narrow rows share a program
_TILE_ELEMENTS = 4096
_FORWARD_ELEMENTS_PER_WARP, _ELEMENTS_PER_WARP = 1024, 512
_MIN_WARPS, _MAX_WARPS = 4, 32
MAX_COLUMNS = 65536

# backward walks the rows in at most this many programs a multiprocessor, reading this many tiles ahead: enough bytes in
# flight, few partial sums. A program of many warps fills a multiprocessor, and its registers hold no tile more
_PROGRAMS_PER_SM = 2
_STAGES = 3
_WIDE_WARPS = 32
# elements that fit a program's registers beside the sums over them: longer rows are read again after their sums
_HELD_ELEMENTS = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPlan:
    """The launches over rows, forward and backward.

    Attributes:
        block: columns of a tile, a power of two not below the row's.
        tile_rows: rows of a tile.
        tiles: tiles of all rows; each is a program of the forward launch.
        forward_warps: warps a program of the forward launch.
        warps: warps a program of the backward launch.
        programs: programs of the backward launch, each with one row of partial sums.
        stages: tiles of the backward launch that are under way at a time.
        reread: whether rows are read a second time instead of held, the second time from the cache.
    """

    block: int
    tile_rows: int
    tiles: int
    forward_warps: int
    warps: int
    programs: int
    stages: int
    reread: bool


def plan_rows(*, rows: int, columns: int, sm_count: int) -> RowPlan:
    """Choose tiles and programs for `rows` rows of `columns` elements.

    Raises:
        KernelInputError: rows too long for one program.
    """
    if columns > MAX_COLUMNS:
        raise KernelInputError(f"a norm over {columns} columns: the kernel takes up to {MAX_COLUMNS}.")
    block = 1 << (columns - 1).bit_length()
    tile_rows = max(1, _TILE_ELEMENTS // block)
    tiles = -(-rows // tile_rows)
    warps = _warps(tile_rows * block, _ELEMENTS_PER_WARP)
    wide = warps >= _WIDE_WARPS
    return RowPlan(
        block=block,
        tile_rows=tile_rows,
        tiles=tiles,
        forward_warps=_warps(tile_rows * block, _FORWARD_ELEMENTS_PER_WARP),
        warps=warps,
        programs=_fewest_programs(tiles, sm_count * (1 if wide else _PROGRAMS_PER_SM)),
        stages=1 if wide else _STAGES,
        reread=block > _HELD_ELEMENTS,
    )


def _warps(elements: int, elements_per_warp: int) -> int:
    return min(max(elements // elements_per_warp, _MIN_WARPS), _MAX_WARPS)


def _fewest_programs(tiles: int, most: int) -> int:
    """As few programs as take no more turns than `most` of them would: fewer partial sums at the same time."""
    turns = max(-(-tiles // most), 1)
    return -(-tiles // turns)
