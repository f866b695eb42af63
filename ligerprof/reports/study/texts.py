"""Texts of a report: values in braces are filled in from the rows, and texts without their values are left out."""

import re
import statistics
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from ligerprof.reports.study.found import Found, minutes_apart
from ligerprof.reports.study.quantities import QUANTITIES, percent, value_of
from ligerprof.runs.study.outline import Value, names_in
from ligerprof.runs.study.schema import StudyFileError
from ligerprof.runs.sweep.borders import edges
from ligerprof.runs.sweep.cells import Cell
from ligerprof.runs.sweep.grid import AXES
from ligerprof.units import format_bytes

# a piece of a text that is left out where one of its values is unknown
_OPTIONAL = re.compile(r"\[\[(.*?)\]\]", re.DOTALL)


class Texts:
    """Fills in the texts of a study."""

    def __init__(self, found: Found) -> None:
        """Args: found: the rows that values are computed from."""
        self._found = found

    @cached_property
    def values(self) -> dict[str, int | float | str | None]:
        """The study's values; None where the rows do not hold them."""
        return {
            name: self._value(value) if isinstance(value, Value) else value
            for name, value in self._found.study.values.items()
        }

    def fill(self, text: str, **local: Any) -> str:
        """A text with its values; empty where one outside of `[[...]]` is unknown.

        Args:
            local: values that this text has in addition.

        Raises:
            StudyFileError: a value cannot be formatted as the text wants it.
        """
        values = {**self.values, **local}
        # every second piece stood in [[ ]]
        pieces = [_fill(piece, values) for piece in _OPTIONAL.split(text)]
        return "".join(piece or "" for piece in pieces) if None not in pieces[::2] else ""

    def _value(self, value: Value) -> int | str | None:
        found = self._found.select(value.where)
        if value.find in ("largest", "smallest-oom"):
            return edges(found, value.axis)[value.find == "smallest-oom"]
        if value.find == "limit":
            limits = {cell.recipe.memory_limit_bytes for cell in found}
            limit_bytes = limits.pop() if len(limits) == 1 else None
            return None if limit_bytes is None else format_bytes(limit_bytes)
        if value.find == "spread":
            return self._spread(value, found)
        if value.find == "end":
            return value.words.get(found[0].status.value) if found else None
        return self._figure(value, found)

    def _figure(self, value: Value, found: tuple[Cell, ...]) -> str | None:
        figure = value_of(found[0], value.show) if found else None
        other = 0.0 if value.minus is None else value_of(self._found.find(value.minus), value.show)
        return None if figure is None or other is None else QUANTITIES[value.show].words(figure - other)

    def _spread(self, value: Value, found: tuple[Cell, ...]) -> str | None:
        """Such as `-6.6 % to +3.0 %, -0.9 % in the median of 15 sizes`."""
        ratios = sorted(self._ratios(value, found))
        if not ratios:
            return None
        ends = f"{percent(ratios[0])} to {percent(ratios[-1])}"
        return f"{ends}, {percent(statistics.median(ratios))} in the median of {len(ratios)} sizes"

    def _ratios(self, value: Value, found: tuple[Cell, ...]) -> Iterator[float]:
        for cell in found:
            size: dict[str, Any] = {name: (getattr(cell.recipe, name),) for name in AXES}
            other = self._found.find({**value.where, **value.against, **size})
            figure, reference = value_of(cell, value.show), value_of(other, value.show)
            if other is not None and figure and reference and _is_in_span(value, minutes_apart((cell, other))):
                yield figure / reference


def _is_in_span(value: Value, minutes: int | None) -> bool:
    if value.within_minutes is not None:
        return minutes is not None and minutes <= value.within_minutes
    return value.beyond_minutes is None or minutes is None or minutes > value.beyond_minutes


def _fill(text: str, values: Mapping[str, Any]) -> str | None:
    if any(values[name] is None for name in names_in(text)):
        return None
    try:
        return text.format_map(values)
    except (ValueError, LookupError, AttributeError) as error:
        raise StudyFileError(f"{text!r:.60}: {error}.") from None
