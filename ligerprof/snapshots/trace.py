"""The events of a device: dicts as a file has them, or rows of a table that become dicts when they are looked at."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt

Event = Mapping[str, Any]
Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

_NUMBER_LIMIT = 2**63
NO_NUMBER = -1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EventTable:
    """Events that have the same keys.

    Attributes:
        columns: for each key a number for each event, or -1 less an index into `objects`.
        objects: what is no number.
    """

    columns: Mapping[str, Int64s]
    objects: Sequence[Any]

    def event(self, row: int) -> dict[str, Any]:
        """One event as a dict."""
        cells = ((key, int(column[row])) for key, column in self.columns.items())
        return {key: cell if cell >= 0 else self.objects[-1 - cell] for key, cell in cells}

    def objects_of(self, key: str, rows: Int64s) -> tuple[Int64s, list[Any]]:
        """A number for what each row has under a key, and the things so numbered."""
        if key not in self.columns:
            return np.zeros(len(rows), dtype=np.int64), [None]
        cells = self.columns[key][rows]
        if len(cells) and cells.max() >= 0:
            # a number where one would expect none: every one is a thing of its own
            return np.arange(len(rows)), [self.event(row)[key] for row in rows.tolist()]
        seen = np.zeros(len(self.objects), dtype=bool)
        seen[-1 - cells] = True
        used = np.flatnonzero(seen)
        return (np.cumsum(seen) - 1)[-1 - cells], [self.objects[index] for index in used.tolist()]


class Trace(Sequence[Event]):
    """Events in their order.

    Args:
        events: those that are dicts.
        table: those that are not.
        rows: of each event the row in the table, or -1 less an index into `events`; None where all are dicts.
    """

    __slots__ = ("_events", "_rows", "_table")

    def __init__(self, events: Sequence[Event], table: EventTable | None = None, rows: Int64s | None = None) -> None:
        self._events = events
        self._table = table or EventTable(columns={}, objects=())
        self._rows = np.arange(-1, -1 - len(events), -1) if rows is None else rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Event: ...

    @overload
    def __getitem__(self, index: slice) -> "Trace": ...

    def __getitem__(self, index: int | slice) -> "Event | Trace":
        if isinstance(index, slice):
            return Trace(self._events, self._table, self._rows[index])
        row = int(self._rows[index])
        return self._table.event(row) if row >= 0 else self._events[-1 - row]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def numbers(self, key: str) -> Int64s:
        """The numbers under a key: 0 for events without, -1 for what is no integer from 0 up to 2**63."""
        column = np.zeros(len(self), dtype=np.int64)
        if key in self._table.columns:
            cells = self._table.columns[key][self._rows[self._in_table]]
            column[self._in_table] = np.maximum(cells, NO_NUMBER)
        values = (event.get(key, 0) for event in self._dicts())
        column[~self._in_table] = [
            value if type(value) is int and 0 <= value < _NUMBER_LIMIT else NO_NUMBER for value in values
        ]
        return column

    def objects(self, key: str) -> tuple[Int64s, list[Any]]:
        """A number for what each event has under a key, and the things so numbered; the same thing has one number.

        Things are the same when they are one object, as a pickle stores what it has seen before.
        """
        column = np.empty(len(self), dtype=np.int64)
        column[self._in_table], found = self._table.objects_of(key, self._rows[self._in_table])
        dicts = self._dicts()
        if dicts:
            numbers = {id(thing): number for number, thing in enumerate(found)}
            column[~self._in_table] = [_number(event.get(key), found, numbers) for event in dicts]
        return column, found

    @property
    def _in_table(self) -> npt.NDArray[np.bool_]:
        in_table: npt.NDArray[np.bool_] = self._rows >= 0
        return in_table

    def _dicts(self) -> list[Event]:
        return [self._events[-1 - row] for row in self._rows[~self._in_table].tolist()]


def _number(thing: Any, found: list[Any], numbers: dict[int, int]) -> int:
    number = numbers.setdefault(id(thing), len(found))
    if number == len(found):
        found.append(thing)
    return number
