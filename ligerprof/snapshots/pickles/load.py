"""Load a snapshot's pickle: its events as tables if their bytes allow it, else as any pickle of plain data."""

from collections.abc import Callable, Iterator, Sequence
from itertools import compress, repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from ligerprof.errors import SnapshotFormatError
from ligerprof.snapshots.pickles.plain import load_plain_data
from ligerprof.snapshots.pickles.table import FIRST_REFERENCE, KEPT, Cut, cut_alike
from ligerprof.snapshots.trace import Bytes, DeviceTrace, EventTable, Int64s

_TRACES = "device_traces"
# the items of a list of events after the cut: None for the events that were read, whole events, and kept values
_MARK, _EVENT, _KEPT = range(3)
_KIND_OF = {type(None): _MARK, dict: _EVENT}
_PROTO_BYTES = 2
_FRAME, _FRAME_HEAD_BYTES = 0x95, 9
# opcodes that append a list of memo entries to the snapshot and pair the two
_OPEN_LIST, _CLOSE_LIST_AND_PAIR = b"](", b"e\x86"
_LOOKUP, _LOOKUP_BYTES = ord("j"), 5


def load_snapshot_data(read: Callable[[], Bytes], *, fast: bool = True) -> Any:
    """Load dicts, lists, text and numbers; no global is resolved, and nothing is called or built.

    Args:
        read: returns the pickle's bytes. The fast path overwrites them; if it gives up, they are read again.
        fast: read lists of events as DeviceTraces where possible. A reference to a whole event from
            elsewhere, which torch never writes, may become None.

    Raises:
        SnapshotFormatError: the pickle holds anything else, or is damaged.
    """
    body = _without_frames(read()) if fast else None
    cut = None if body is None else cut_alike(body)
    values = None if cut is None else _joined(cut)
    # the fast path also gives up on invalid data; this reader's error then names the problem and its place
    return load_plain_data(read().tobytes()) if values is None else values


def _without_frames(pickled: Bytes) -> Bytes | None:
    """Remove the frame opcodes, which only announce lengths; None if there is anything else between two frames."""
    bounds = []
    position = _PROTO_BYTES
    while position + _FRAME_HEAD_BYTES < len(pickled) and pickled[position] == _FRAME:
        start = position + _FRAME_HEAD_BYTES
        position = start + int.from_bytes(pickled[position + 1 : start].tobytes(), "little")
        bounds.append((start, position))
    if not bounds:
        return pickled
    if position != len(pickled):
        return None
    end = _PROTO_BYTES
    for start, stop in bounds:
        pickled[end : end + stop - start] = pickled[start:stop]
        end += stop - start
    return pickled[:end]


def _joined(cut: Cut) -> Any:
    """Load the rest of the pickle and insert the tables; None if the two do not match."""
    cells = [_Cells(column) for column in cut.columns if column.min() < 0]
    references = _references(cells, cut.pickled_bytes)
    loaded = None if references is None else _load(cut, references)
    if references is None or loaded is None:
        return None
    values, keys, objects = loaded
    traces: Any = values.get(_TRACES)
    are_lists = isinstance(traces, list) and {list}.issuperset(map(type, traces))
    if "action" not in keys or not {str}.issuperset(map(type, keys)) or not are_lists:
        return None
    kinds = [np.fromiter(map(_KIND_OF.get, map(type, items), repeat(_KEPT)), np.int8, len(items)) for items in traces]
    kept = [item for items, kind in zip(traces, kinds, strict=True) for item in compress(items, kind == _KEPT)]
    if sum(int(np.count_nonzero(kind == _MARK)) for kind in kinds) != len(cut.counts):
        return None
    if not _encode(cells, references, len(kept)) or not _fill_copies(cut, len(references), kept):
        return None
    table = EventTable(columns=dict(zip(keys, cut.columns, strict=True)), objects=[*objects, *kept])
    values[_TRACES] = list(_traces(traces, kinds, table, cut))
    return values


def _load(cut: Cut, references: Int64s) -> tuple[dict[Any, Any], list[Any], list[Any]] | None:
    """The rest of the pickle, the table's keys, and the objects its cells refer to; None if it is not a snapshot."""
    lookups = np.zeros((len(cut.keys) + len(references), _LOOKUP_BYTES), dtype=np.uint8)
    lookups[:, 0] = _LOOKUP
    lookups[:, 1:] = np.concatenate([cut.keys, references]).astype("<u4").view(np.uint8).reshape(-1, 4)
    try:
        loaded = load_plain_data(cut.rest, extra=_OPEN_LIST + lookups.tobytes() + _CLOSE_LIST_AND_PAIR)
    except SnapshotFormatError:
        return None
    # a crafted file may stop before our opcodes
    if not isinstance(loaded, tuple) or len(loaded) != 2 or not isinstance(loaded[0], dict):
        return None
    values, known = loaded
    return values, known[: len(cut.keys)], known[len(cut.keys) :]


class _Cells:
    """The places of a column that do not hold numbers."""

    def __init__(self, column: Int64s) -> None:
        self.column = column
        self.referring = np.flatnonzero(column <= FIRST_REFERENCE)
        self.kept = np.flatnonzero(column == KEPT)
        self.memo_indices = FIRST_REFERENCE - column[self.referring]


def _references(cells: Sequence[_Cells], memo_limit: int) -> Int64s | None:
    """The memo indices that columns refer to, ascending; None if one is larger than the memo can be."""
    highest = max((int(each.memo_indices.max(initial=-1)) for each in cells), default=-1)
    if highest > memo_limit:
        return None
    seen = np.zeros(highest + 1, dtype=bool)
    for each in cells:
        seen[each.memo_indices] = True
    return np.flatnonzero(seen).astype(np.int64)


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
        each.column[each.referring] = -1 - index_of[each.memo_indices]
        each.column[each.kept] = -1 - kept_before[each.kept]
        kept_before[each.kept] += 1
    return True


def _fill_copies(cut: Cut, reference_count: int, kept: Sequence[Any]) -> bool:
    """Fill the lists that were cut empty, and make the table share equal lists; False if any is not a list."""
    column = cut.columns[-1]
    items = -1 - column[np.stack([cut.copies, cut.originals])] - reference_count
    for copy, original in items.T.tolist():
        if type(kept[copy]) is not list or type(kept[original]) is not list:
            return False
        kept[copy].extend(kept[original])
    column[cut.copies] = column[cut.originals]
    return True


def _traces(
    traces: Sequence[Sequence[Any]], kinds: Sequence[npt.NDArray[np.int8]], table: EventTable, cut: Cut
) -> Iterator[DeviceTrace]:
    """The events of each device; each None is replaced by the number of table rows that `counts` states."""
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
        yield DeviceTrace(list(compress(items, is_dict.tolist())), table, rows)
        marks = marks_after
