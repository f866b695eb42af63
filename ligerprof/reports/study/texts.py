"""Texts of a report: values in braces are filled in from the rows, and texts whose values are unknown are left out."""

import re
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from ligerprof.reports.study.found import Found, figure_text, minutes_apart, percent, shared_limit_bytes, value_of
from ligerprof.runs.study.file import names_in
from ligerprof.runs.study.outline import StudyFileError, Value
from ligerprof.runs.sweep.cells import Cell
from ligerprof.runs.sweep.grid import AXES
from ligerprof.runs.sweep.runner import edges
from ligerprof.units import format_bytes

# a piece of a text that is left out if one of its values is unknown
_OPTIONAL = re.compile(r"\[\[(.*?)\]\]", re.DOTALL)


class Texts:
    """Fills in the texts of a study; `values` holds None for values that the rows do not provide."""

    def __init__(self, found: Found) -> None:
        self.values = {name: _value(found, value) for name, value in found.study.values.items()}

    def fill(self, text: str, **local: Any) -> str:
        """A text with its values; empty if one outside of `[[...]]` is unknown.

        Args:
            local: values for this text only.

        Raises:
            StudyFileError: a value does not support its format specification.
        """
        values = {**self.values, **local}
        # every second piece was in [[ ]]
        pieces = [_fill(piece, values) for piece in _OPTIONAL.split(text)]
        return "".join(piece or "" for piece in pieces) if None not in pieces[::2] else ""


def _fill(text: str, values: Mapping[str, Any]) -> str | None:
    if any(values[name] is None for name in names_in(text)):
        return None
    try:
        return text.format_map(values)
    except (ValueError, LookupError, AttributeError) as error:
        raise StudyFileError(f"{text!r:.60}: {error}.") from None


def _value(found: Found, value: Value) -> int | str | None:
    cells = found.select(value.where)
    if value.find in ("largest", "smallest-oom"):
        return edges(cells, value.axis)[value.find == "smallest-oom"]
    if value.find == "limit":
        limit_bytes = shared_limit_bytes(cells)
        return None if limit_bytes is None else format_bytes(limit_bytes)
    if value.find == "spread":
        return _spread(sorted(_ratios(found, value, cells)))
    if value.find == "end":
        return value.words.get(cells[0].status.value) if cells else None
    figure = value_of(cells[0], value.show) if cells else None
    other = 0.0 if value.against is None else value_of(found.find({**value.where, **value.against}), value.show)
    return None if figure is None or other is None else figure_text(figure - other, value.show, format_bytes)


def _spread(ratios: list[float]) -> str | None:
    """Such as `-6.6 % to +3.0 %, -0.9 % in the median of 15 sizes`."""
    if not ratios:
        return None
    ends = f"{percent(ratios[0])} to {percent(ratios[-1])}"
    return f"{ends}, {percent(statistics.median(ratios))} in the median of {len(ratios)} sizes"


def _ratios(found: Found, value: Value, cells: tuple[Cell, ...]) -> Iterator[float]:
    """Each cell's figure over that of the cell of the same size that `against` selects."""
    for cell in cells:
        size: dict[str, Any] = {name: (getattr(cell.recipe, name),) for name in AXES}
        other = found.find({**value.where, **(value.against or {}), **size})
        figure, reference = value_of(cell, value.show), value_of(other, value.show)
        if other is not None and figure and reference and _is_in_span(value, minutes_apart((cell, other))):
            yield figure / reference


def _is_in_span(value: Value, minutes: int | None) -> bool:
    if value.within_minutes is not None:
        return minutes is not None and minutes <= value.within_minutes
    return value.beyond_minutes is None or minutes is None or minutes > value.beyond_minutes
