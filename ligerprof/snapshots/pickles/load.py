"""Load a snapshot's pickle: its events as tables if their bytes allow it, else as any pickle of plain data."""

from collections.abc import Callable, Iterator, Sequence
from itertools import compress, repeat
from sys import getrefcount
from typing import Any

import numpy as np
import numpy.typing as npt

from ligerprof.errors import SnapshotFormatError
from ligerprof.snapshots.collector import return_freed_memory
from ligerprof.snapshots.pickles.plain import load_plain_data, without_frames
from ligerprof.snapshots.pickles.table import FIRST_REFERENCE, KEPT, Cut, cut_alike
from ligerprof.snapshots.trace import Bytes, Column, DeviceTrace, EventTable, Int64s
from ligerprof.snapshots.watch import Allowance, LimitError

_TRACES = "device_traces"
# smaller files take less memory than is worth the time of getting it again
_LARGE_BYTES = 2**29
# the items of a list of events after the cut: a number for the events that were read, whole events, and kept values
_MARK, _EVENT, _LIST, _OTHER = range(4)
_KIND_OF = {int: _MARK, dict: _EVENT, list: _LIST}
# opcodes that append a list of memo entries to the snapshot and pair the two
_OPEN_LIST, _CLOSE_LIST_AND_PAIR = b"](", b"e\x86"
# a column with at least this share of other cells is encoded cell by cell
_OTHERS_SHARE = 8
_LOOKUP, _LOOKUP_BYTES = ord("j"), 5
# of an object that two lists hold and nothing else; here, a single one does
_COUNT_IN_TWO_LISTS = next(map(getrefcount, [[]])) + 1


def load_snapshot_data(read: Callable[[], Bytes], *, fast: bool = True) -> Any:
    """Load dicts, lists, text and numbers; no global is resolved, and nothing is called or built.

    Args:
        read: returns the pickle's bytes. The fast path overwrites them; if it gives up, they are read again.
        fast: read lists of events as DeviceTraces where possible.

    Raises:
        SnapshotFormatError: the pickle holds anything else, or is damaged.
    """
    values = _load_tables(read) if fast else None
    if values is not None:
        return values
    # the fast path also gives up on invalid data; this reader's error then names the problem and its place
    content = read()
    return load_plain_data(content, Allowance(len(content)))


def _load_tables(read: Callable[[], Bytes]) -> Any:
    """Load a snapshot with its events as tables; None if the bytes do not allow it."""
    content = read()
    allowance = Allowance(len(content))
    body = without_frames(content)
    cut = None if body is None else cut_alike(body)
    is_large = len(content) > _LARGE_BYTES
    del content, body
    if is_large:
        return_freed_memory()
    return None if cut is None else _joined(cut, allowance)


def _joined(cut: Cut, allowance: Allowance) -> Any:
    """Load the rest of the pickle and insert the tables; None if the two do not match."""
    cells = [_Cells(column) for column in cut.columns if column.min() < 0]
    loaded = _load(cut, allowance)
    if loaded is None:
        return None
    values, keys, objects = loaded
    traces: Any = values.get(_TRACES)
    has_lists = isinstance(traces, list) and {list}.issuperset(map(type, traces))
    if "action" not in keys or not {str}.issuperset(map(type, keys)) or not has_lists:
        return None
    kinds = [np.fromiter(map(_KIND_OF.get, map(type, items), repeat(_OTHER)), np.int8, len(items)) for items in traces]
    kept = [
        item for items, kind in zip(traces, kinds, strict=True) for item in compress(items, (kind >= _LIST).tolist())
    ]
    are_lists = np.concatenate([kind[kind >= _LIST] for kind in kinds] or [np.empty(0, np.int8)]) == _LIST
    marks = [
        mark for items, kind in zip(traces, kinds, strict=True) for mark in compress(items, (kind == _MARK).tolist())
    ]
    # something else refers to an event that was cut out
    is_missed = max(map(getrefcount, marks), default=0) > _COUNT_IN_TWO_LISTS
    if len(marks) != len(cut.counts) or is_missed:
        return None
    del marks
    if not _encode(cells, cut.references, len(kept)):
        return None
    # they take as much memory as the columns
    del cells
    if not _fill_copies(cut, len(cut.references), kept, are_lists):
        return None
    objects += kept
    del kept
    table = EventTable(columns=dict(zip(keys, cut.columns, strict=True)), objects=objects)
    values[_TRACES] = list(_traces(traces, kinds, table, cut))
    return values


def _load(cut: Cut, allowance: Allowance) -> tuple[dict[Any, Any], list[Any], list[Any]] | None:
    """The rest of the pickle, the table's keys, and the objects its cells refer to; None if it is not a snapshot."""
    lookups = np.zeros((len(cut.keys) + len(cut.references), _LOOKUP_BYTES), dtype=np.uint8)
    lookups[:, 0] = _LOOKUP
    lookups[:, 1:] = np.concatenate([cut.keys, cut.references]).astype("<u4").view(np.uint8).reshape(-1, 4)
    rest = np.frombuffer(bytearray(cut.rest), dtype=np.uint8)
    try:
        loaded = load_plain_data(rest, allowance, extra=_OPEN_LIST + lookups.tobytes() + _CLOSE_LIST_AND_PAIR)
    except LimitError:
        raise
    except SnapshotFormatError:
        return None
    # a crafted file may stop before our opcodes
    if not isinstance(loaded, tuple) or len(loaded) != 2 or not isinstance(loaded[0], dict):
        return None
    values, known = loaded
    return values, known[: len(cut.keys)], known[len(cut.keys) :]


class _Cells:
    """The places of a column that do not hold numbers; it has at least one reference or kept value."""

    def __init__(self, column: Column) -> None:
        self.column = column
        self.kept = np.flatnonzero(column == KEPT)
        # of most columns, nearly every cell is a reference: whole columns take less time than chosen cells
        self.others = np.flatnonzero(column > FIRST_REFERENCE)
        self.referring: Int64s | slice = slice(None)
        if len(self.others) > len(column) // _OTHERS_SHARE:
            self.referring, self.others = np.flatnonzero(column <= FIRST_REFERENCE), self.others[:0]
        self.memo_indices = FIRST_REFERENCE - column[self.referring]
        # any reference that occurs
        self.memo_indices[self.others] = FIRST_REFERENCE - column.min()

    def encode(self, index_of: Int64s) -> None:
        """Replace each reference by -1 - the index of its memo index."""
        others = self.column[self.others]
        self.column[self.referring] = -1 - index_of[self.memo_indices]
        self.column[self.others] = others


def _encode(cells: Sequence[_Cells], references: Int64s, kept_count: int) -> bool:
    """Replace references, then kept values, in cells by -1 - index; False if `kept_count` does not match."""
    if sum(len(each.kept) for each in cells) != kept_count:
        return False
    index_of = np.zeros(int(references[-1]) + 1 if len(references) else 0, dtype=np.int64)
    index_of[references] = np.arange(len(references))
    kept_before = np.zeros(max((len(each.column) for each in cells), default=0), dtype=np.int64)
    for each in cells:
        kept_before[each.kept] += 1
    kept_before = np.cumsum(kept_before) - kept_before + len(references)
    for each in cells:
        each.encode(index_of)
        each.column[each.kept] = -1 - kept_before[each.kept]
        kept_before[each.kept] += 1
    return True


def _fill_copies(cut: Cut, reference_count: int, kept: Sequence[Any], are_lists: npt.NDArray[np.bool_]) -> bool:
    """Make the table share equal lists, and fill those that were cut empty; False if any is not a list.

    Most of them are then not needed: only those that something else in the file refers to are filled.
    """
    column = cut.columns[-1]
    copies, originals = (-1 - column[places] - reference_count for places in (cut.copies, cut.originals))
    if not are_lists[copies].all() or not are_lists[originals].all():
        return False
    # the trace and `kept` hold each list
    counts = map(getrefcount, map(kept.__getitem__, copies.tolist()))
    for place in [place for place, count in enumerate(counts) if count > _COUNT_IN_TWO_LISTS]:
        kept[copies[place]].extend(kept[originals[place]])
    column[cut.copies] = column[cut.originals]
    return True


def _traces(
    traces: Sequence[Sequence[Any]], kinds: Sequence[npt.NDArray[np.int8]], table: EventTable, cut: Cut
) -> Iterator[DeviceTrace]:
    """The events of each device; each number is replaced by the number of table rows that `counts` states."""
    first_places = np.append(0, np.cumsum(cut.counts))
    marks = 0
    for items, kind in zip(traces, kinds, strict=True):
        is_mark, is_dict = kind == _MARK, kind == _EVENT
        marks_after = marks + int(np.count_nonzero(is_mark))
        # kept values are not events
        sizes, firsts = is_dict.astype(np.int64), np.zeros(len(items), dtype=np.int64)
        sizes[is_mark], firsts[is_mark] = cut.counts[marks:marks_after], first_places[marks:marks_after]
        in_table = np.repeat(is_mark, sizes)
        rows = np.repeat(firsts - np.cumsum(sizes) + sizes, sizes) + np.arange(len(in_table))
        rows[in_table] = cut.places[rows[in_table]]
        rows[~in_table] = np.arange(-1, -1 - np.count_nonzero(is_dict), -1)
        yield DeviceTrace([items[place] for place in np.flatnonzero(is_dict).tolist()], table, rows)
        marks = marks_after
