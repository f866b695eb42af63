"""How the report writes sizes, cells and tables in Markdown."""

from collections.abc import Iterable, Sequence

from ligerprof.runs.sweep.cells import Cell, CellStatus
from ligerprof.units import GIB

OUT_OF_MEMORY = "OOM"
# above a size that was out of memory, and not run for that
BEYOND = "\N{EN DASH}"


def gib(size_bytes: int) -> str:
    """A size in GiB, two digits."""
    return f"{size_bytes / GIB:.2f}"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table whose columns but the first are aligned to the right."""
    rule = ["---", *["---:"] * (len(headings) - 1)]
    return [_line(headings), _line(rule), *(_line(row) for row in rows), ""]


def peak_and_reserved(cell: Cell | None) -> str:
    """Such as `9.06 / 10.58`, in GiB."""
    if cell is None or cell.status is not CellStatus.DONE or cell.figures is None:
        return _missing(cell)
    return " / ".join(gib(size) for size in (cell.figures.peak_bytes, cell.reserved_bytes) if size is not None)


def peak(cell: Cell | None) -> str:
    """The peak in GiB."""
    if cell is None or cell.status is not CellStatus.DONE or cell.figures is None:
        return _missing(cell)
    return gib(cell.figures.peak_bytes)


def speed(cell: Cell | None) -> str:
    """Tokens a second."""
    if cell is None or cell.status is not CellStatus.DONE or cell.tokens_per_second is None:
        return _missing(cell)
    return f"{cell.tokens_per_second:,.0f}"


def percent(ratio: float, digits: int = 1) -> str:
    """A ratio less one, with its sign where it is not zero."""
    value = round(100 * (ratio - 1), digits)
    return f"{value:+.{digits}f} %" if value else f"{0:.{digits}f} %"


def _missing(cell: Cell | None) -> str:
    return OUT_OF_MEMORY if cell is not None and cell.status is CellStatus.OOM else ""


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
