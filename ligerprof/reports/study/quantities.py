"""The figures of a step that tables and texts show."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ligerprof.roles import Role
from ligerprof.runs.sweep.cells import Cell, CellStatus
from ligerprof.torch_memory.dtypes import FP32_BYTES
from ligerprof.units import GIB, format_bytes

OUT_OF_MEMORY = "OOM"
_LOSS = (Role.LOGITS, Role.SHIFT_LOGITS, Role.CE_TEMPORARIES)


class Quantity(NamedTuple):
    """One figure of a finished step.

    Attributes:
        value: the number, None where the row lacks it.
        short: the number in a table whose heading has the unit.
        words: the number in a sentence.
    """

    value: Callable[[Cell], float | None]
    short: Callable[[float], str]
    words: Callable[[float], str]


def peak_bytes(cell: Cell) -> int:
    """Peak allocated bytes; 0 where the row lacks them."""
    return cell.figures.peak_bytes if cell.figures is not None else 0


def role_bytes(cell: Cell, *roles: Role) -> int:
    """Bytes of roles at the peak; 0 where the row lacks them."""
    return sum(cell.figures.roles[role] for role in roles) if cell.figures is not None else 0


def value_of(cell: Cell | None, show: str) -> float | None:
    """A figure as a number, None for a step that did not run to its end or lacks it."""
    return QUANTITIES[show].value(cell) if cell is not None and cell.status is CellStatus.DONE else None


def in_table(cell: Cell | None, show: str) -> str:
    """A figure in a table."""
    value = value_of(cell, show)
    if cell is None or value is None:
        return OUT_OF_MEMORY if cell is not None and cell.status is CellStatus.OOM else ""
    if show == "peak and reserved" and cell.reserved_bytes is not None:
        return f"{gib(value)} / {gib(cell.reserved_bytes)}"
    return QUANTITIES[show].short(value)


def gib(size_bytes: float) -> str:
    """A size in GiB, two digits."""
    return f"{size_bytes / GIB:.2f}"


def percent(ratio: float, digits: int = 1) -> str:
    """A ratio less one, with its sign unless it rounds to zero."""
    value = round(100 * (ratio - 1), digits)
    return f"{value:+.{digits}f} %" if value else f"{0:.{digits}f} %"


def _loss_bytes(cell: Cell) -> int:
    return role_bytes(cell, *_LOSS)


def _logits_bytes(cell: Cell) -> int:
    """One [T, V] logits tensor in fp32."""
    return cell.recipe.tokens * cell.recipe.spec.vocab_size * FP32_BYTES


def _size(value: Callable[[Cell], float | None]) -> Quantity:
    return Quantity(value, gib, lambda size_bytes: format_bytes(round(size_bytes)))


def _number(value: Callable[[Cell], float | None], form: str) -> Quantity:
    return Quantity(value, form.format, form.format)


_PEAK = _size(lambda cell: peak_bytes(cell) or None)
QUANTITIES: Mapping[str, Quantity] = {
    "peak": _PEAK,
    "peak and reserved": _PEAK,
    "reserved": _size(lambda cell: cell.reserved_bytes),
    "tokens/s": _number(lambda cell: cell.tokens_per_second, "{:,.0f}"),
    "loss": _size(_loss_bytes),
    "loss share": _number(lambda cell: 100 * _loss_bytes(cell) / max(peak_bytes(cell), 1), "{:.0f} %"),
    "loss in logits": _number(lambda cell: _loss_bytes(cell) / _logits_bytes(cell), "{:.2f} x"),
    "logits": _size(_logits_bytes),
}
