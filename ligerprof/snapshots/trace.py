"""The events of a device: dicts as in the file, or table rows that become dicts on access; as checked columns."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from ligerprof.errors import SnapshotFormatError
from ligerprof.text import short_repr

Event = Mapping[str, Any]
Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]

_NUMBER_LIMIT = 2**63
_NO_NUMBER = -1
# shorter traces take little memory; the keys of most events are those of most of a few
_LEAST_ROWS, _SAMPLES, _MOST_KEYS = 1000, 100, 32


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EventTable:
    """Events that have the same keys.

    Attributes:
        columns: the values of each key, one per event: a number, or -1 - i for `objects[i]`.
    """

    columns: Mapping[str, Int64s]
    objects: Sequence[Any]

    def event(self, row: int) -> dict[str, Any]:
        """One event as a dict."""
        cells = ((key, int(column[row])) for key, column in self.columns.items())
        return {key: cell if cell >= 0 else self.objects[-1 - cell] for key, cell in cells}

    def objects_of(self, key: str, rows: Int64s) -> tuple[Int64s, list[Any]]:
        """Index of the value of a key in each of some rows, and the values."""
        if key not in self.columns:
            return np.zeros(len(rows), dtype=np.int64), [None]
        cells = self.columns[key][rows]
        if cells.max() >= 0:
            # unexpected numbers among them: each value gets its own index
            values = [cell if cell >= 0 else self.objects[-1 - cell] for cell in cells.tolist()]
            return np.arange(len(cells)), values
        indices = -1 - cells
        seen = np.zeros(len(self.objects), dtype=bool)
        seen[indices] = True
        used = np.flatnonzero(seen)
        return (np.cumsum(seen) - 1)[indices], [self.objects[index] for index in used.tolist()]


class DeviceTrace(Sequence[Event]):
    """The events of one device, in order.

    Args:
        events: the events that are dicts.
        table: the others.
        rows: for each event its row in the table, or -1 - i for `events[i]`; None if all events are dicts.
    """

    __slots__ = ("_events", "_in_table", "_objects", "_rows", "_table")

    def __init__(self, events: Sequence[Event], table: EventTable | None = None, rows: Int64s | None = None) -> None:
        self._events = events
        self._table = table or EventTable(columns={}, objects=())
        self._rows = np.arange(-1, -1 - len(events), -1) if rows is None else rows
        self._objects: dict[str, tuple[Int64s, list[Any]]] = {}
        self._in_table = self._rows >= 0

    @classmethod
    def in_columns(cls, events: list[dict[str, Any]]) -> "DeviceTrace":
        """A trace whose dicts become table rows where they can. Empties the list, since dicts take much memory."""
        if len(events) < _LEAST_ROWS:
            return cls(events)
        samples = events[:: max(1, len(events) // _SAMPLES)]
        keys = Counter(map(tuple, samples)).most_common(1)[0][0]
        if not keys or len(keys) > _MOST_KEYS or not {str}.issuperset(map(type, keys)):
            return cls(events)
        columns, objects = {key: np.empty(len(events), dtype=np.int64) for key in keys}, _Numbered()
        rows, others = np.empty(len(events), dtype=np.int64), []
        count = 0
        for place, event in enumerate(events):
            if tuple(event) != keys:
                others.append(event)
                rows[place] = -len(others)
                continue
            for column, value in zip(columns.values(), event.values(), strict=True):
                is_number = type(value) is int and 0 <= value < _NUMBER_LIMIT
                column[count] = value if is_number else -1 - objects.number_of(value)
            rows[place] = count
            count += 1
        events.clear()
        found = {key: column[:count] for key, column in columns.items()}
        return cls(others, EventTable(columns=found, objects=objects.found), rows)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Event: ...

    @overload
    def __getitem__(self, index: slice) -> "DeviceTrace": ...

    def __getitem__(self, index: int | slice) -> "Event | DeviceTrace":
        if isinstance(index, slice):
            return DeviceTrace(self._events, self._table, self._rows[index])
        row = int(self._rows[index])
        return self._table.event(row) if row >= 0 else self._events[-1 - row]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(left == right for left, right in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def numbers(self, key: str) -> Int64s:
        """Values of `key`, one per event: 0 if missing, -1 if not an integer in [0, 2**63)."""
        column = np.zeros(len(self), dtype=np.int64)
        if key in self._table.columns:
            column[self._in_table] = np.maximum(self._table.columns[key][self._rows[self._in_table]], _NO_NUMBER)
        values = (event.get(key, 0) for event in self._dicts())
        column[~self._in_table] = [
            value if type(value) is int and 0 <= value < _NUMBER_LIMIT else _NO_NUMBER for value in values
        ]
        return column

    def objects(self, key: str) -> tuple[Int64s, list[Any]]:
        """Index of each event's value of a key, and the values; None for events without the key.

        Values are distinguished by identity, since a pickle stores an object that it has seen as a reference; texts, of
        which torch makes one per event, by what they say. Both are kept for the next call, and must not be changed.
        """
        if key not in self._objects:
            self._objects[key] = self._find_objects(key)
        return self._objects[key]

    def _find_objects(self, key: str) -> tuple[Int64s, list[Any]]:
        column, found = np.zeros(len(self), dtype=np.int64), list[Any]()
        if self._in_table.any():
            column[self._in_table], found = self._table.objects_of(key, self._rows[self._in_table])
        if not self._in_table.all():
            values = _Numbered(found)
            column[~self._in_table] = [values.number_of(event.get(key)) for event in self._dicts()]
        return _equal_texts_once(column, found)

    def _dicts(self) -> list[Event]:
        return [self._events[-1 - row] for row in self._rows[~self._in_table].tolist()]


def _equal_texts_once(column: Int64s, found: list[Any]) -> tuple[Int64s, list[Any]]:
    """The same with each text once."""
    numbers: dict[Any, int] = {}
    # a tuple is not equal to a text
    keys = (value if type(value) is str else (id(value),) for value in found)
    places = np.fromiter((numbers.setdefault(key, len(numbers)) for key in keys), np.int64, len(found))
    if len(numbers) == len(found):
        return column, found
    values: list[Any] = [None] * len(numbers)
    for place, value in zip(places.tolist(), found, strict=True):
        values[place] = value
    return places[column], values


class _Numbered:
    """Objects numbered in the order in which they appear, distinguished by identity."""

    def __init__(self, found: list[Any] | None = None) -> None:
        self.found: list[Any] = [] if found is None else found
        self._numbers = {id(value): number for number, value in enumerate(self.found)}

    def number_of(self, value: Any) -> int:
        """The number of an object, which is kept."""
        number = self._numbers.setdefault(id(value), len(self.found))
        if number == len(self.found):
            self.found.append(value)
        return number


def integer_of(values: Mapping[str, Any], key: str) -> int | None:
    """The value of a key of an event or segment; None if it is missing or not an integer."""
    value = values.get(key)
    return value if type(value) is int else None


# virtual addresses have at most 57 bits, and no device has 16 TiB
ADDRESS_LIMIT = 2**62
SIZE_LIMIT = 2**44
# sums of sizes stay within 64 bits
TOTAL_LIMIT = 2**62


class Action(IntEnum):
    """Events that move memory, and out-of-memory, as the file names them; of others only the position counts."""

    ALLOC = 0
    FREE_REQUESTED = 1
    FREE_COMPLETED = 2
    SEGMENT_ALLOC = 3
    SEGMENT_FREE = 4
    SEGMENT_MAP = 5
    SEGMENT_UNMAP = 6
    OOM = 7


ACTIONS = tuple(action.name.lower() for action in Action)
# those that add memory of the driver, and those that give it back
GROWS, SHRINKS = (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP), (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)
# torch's other actions: a mark in time, a label for a block, a range of a profiler
_MARKS = ("snapshot", "annotate", "user_defined")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EventColumns:
    """The part of each event that moves memory.

    Attributes:
        actions: indices into ACTIONS; all other actions share one more index.
        addresses: 0 if an event has none.
        sizes: requested bytes, or a segment's bytes.
    """

    actions: Int64s
    addresses: Int64s
    sizes: Int64s

    @classmethod
    def of(cls, trace: DeviceTrace, where: str) -> "EventColumns":
        """Copy and check the columns of a trace.

        Raises:
            SnapshotFormatError: an event lacks `action` or an address, or these or its size are not in range.
        """
        codes, names = trace.objects("action")
        known = {name: code for code, name in enumerate(ACTIONS)}
        numbers = [known.get(name, len(known)) if type(name) is str else -1 for name in names]
        actions = np.array(numbers, dtype=np.int64)[codes]
        if len(nameless := np.flatnonzero(actions < 0)):
            raise SnapshotFormatError(f"{where}: event {nameless[0]} has no action. Was the file damaged?")
        addresses, sizes = _numbers(trace, "addr", ADDRESS_LIMIT, where), _numbers(trace, "size", SIZE_LIMIT, where)
        if len(lost := np.flatnonzero((actions < Action.OOM) & (addresses == 0))):
            raise SnapshotFormatError(f"{where}: event {lost[0]} has no address. Was the file damaged?")
        if sizes.sum(dtype=np.float64) >= TOTAL_LIMIT:
            raise SnapshotFormatError(f"{where}: its events have more bytes than 62 bits can count. Was it damaged?")
        return cls(actions=actions, addresses=addresses, sizes=sizes)


def unknown_actions(trace: DeviceTrace) -> dict[str, int]:
    """The number of events of each action that is neither replayed nor known to move no memory."""
    codes, names = trace.objects("action")
    counts: Counter[str] = Counter()
    for name, count in zip(names, np.bincount(codes, minlength=len(names)).tolist(), strict=True):
        if isinstance(name, str) and name not in ACTIONS and name not in _MARKS:
            counts[name] += count
    return counts


def _numbers(trace: DeviceTrace, key: str, limit: int, where: str) -> Int64s:
    numbers = trace.numbers(key)
    if len(wrong := np.flatnonzero((numbers < 0) | (numbers >= limit))):
        value = trace[int(wrong[0])].get(key)
        raise SnapshotFormatError(f"{where}: {key} number {wrong[0]} is {short_repr(value)}. Was the file damaged?")
    return numbers


_ODD_NUMBER = 0x9E3779B97F4A7C15


def distinct_rows(columns: Sequence[npt.NDArray[np.generic]]) -> tuple[Int64s, Int64s]:
    """Compare rows whose columns hold integers or flags.

    Returns:
        Index of the first row of each kind, and the kind of each row.
    """
    # column by column: a table of them takes more memory than the recording
    sums, factor = np.zeros(len(columns[0]), dtype=np.uint64), 1
    for column in columns:
        factor = factor * _ODD_NUMBER % 2**64
        sums += column.astype(np.int64).view(np.uint64) * np.uint64(factor)
    _, first, kind = np.unique(sums, return_index=True, return_inverse=True)
    if not all((column[first][kind] == column).all() for column in columns):
        # rows with equal sums that differ, which are rare
        table = np.stack([column.astype(np.int64) for column in columns])
        _, first, kind = np.unique(table, axis=1, return_index=True, return_inverse=True)
    return first, kind.reshape(-1)


def runs(items: Int64s, keys: Int64s) -> list[Int64s]:
    """The items in parts of consecutive ones whose keys are equal; none without items."""
    return np.split(items, np.flatnonzero(np.diff(keys)) + 1) if len(items) else []


def groups(items: Int64s, keys: Int64s) -> list[Int64s]:
    """The items of each key, in their order, by ascending keys."""
    order = np.argsort(keys, kind="stable")
    return runs(items[order], keys[order])


def number_pairs(firsts: Int64s, seconds: Int64s) -> Int64s:
    """A number for each pair of numbers from 0, ascending without gaps, equal for equal pairs.

    The highest numbers must not be larger than the count of any array that fits in memory.
    """
    return np.unique(firsts * (int(seconds.max(initial=0)) + 1) + seconds, return_inverse=True)[1]
