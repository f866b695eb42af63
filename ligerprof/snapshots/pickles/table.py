"""Read the dicts of a pickle that share a layout as columns, from their bytes, and cut them out of the pickle."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from ligerprof.snapshots.distinct import distinct
from ligerprof.snapshots.parallel import at_once
from ligerprof.snapshots.pickles.layout import WORD_BYTES, read_layout
from ligerprof.snapshots.pickles.rows import (
    FIRST_REFERENCE,
    GROWTH,
    KEPT,
    LEAST_ALIKE,
    MARK,
    MEMOIZE,
    NUMBER,
    PUT_BYTES,
    ROWS_AT_ONCE,
    Rows,
)
from ligerprof.snapshots.trace import Bytes, Column, Int64s

_DICT, _POP = ord("}"), ord("0")
_REFERENCE_BYTES = np.zeros(256, dtype=np.int64)
_REFERENCE_BYTES[[ord("h"), ord("j")]] = 2, 5
_FIRST_BYTES = np.array([2 ** (8 * size) - 1 for size in range(6)], dtype=np.uint64)
_LONGEST_HEAD_BYTES = 16
_NO_REFERENCE = 0
# parts of a pickle that are searched for its most frequent dict, and their size
_SAMPLES, _SAMPLE_BYTES = 64, 2**13
# pieces that fit in the processor's caches
_BYTES_AT_ONCE = 2**21
# fewer dicts are read in one thread
_LEAST_IN_THREADS = 2**16
# limits on memory that recordings do not reach
_SHORTEST_EVENT_BYTES = 24
_MOST_KEYS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """A pickle without the dicts that were read from its bytes.

    Attributes:
        rest: the pickle with a number in place of each dict or run of dicts that was read, followed by the kept values.
        counts: number of dicts that each number replaces; if more than one, none of them keeps a value.
        keys: memo indices of the keys.
        columns: one row per key, of numbers, memo indices and kept values.
        places: indices of the dicts in the columns, in order; the other cells are 0.
        references: the memo indices that columns refer to, ascending. The rest looks each up where it is first used.
        copies: places of dicts whose last value is a list equal to another's, and was cut empty.
        originals: places of those others.
    """

    rest: bytes
    counts: Int64s
    keys: tuple[int, ...]
    columns: list[Column]
    places: Int64s
    references: Int64s
    copies: Int64s
    originals: Int64s


def cut_alike(data: Bytes) -> Cut | None:
    """Cut the most frequent kind of dict out of a pickle without frames; None if there are too few of them.

    Each dict that is cut has, byte for byte, the opcodes of one that was read token by token. Text
    that imitates a dict is detected when the rest is loaded: the counts then differ.

    Args:
        data: the pickle's bytes, overwritten.
    """
    first_key = _most_frequent_first_key(data)
    starts = None if first_key is None else _starts(data, first_key)
    if starts is None or len(starts) < LEAST_ALIKE:
        return None
    keys = _most_frequent_keys(data, starts)
    return None if keys is None else _Cutter(data, starts, keys).cut()


def _starts(data: Bytes, first_key: int) -> Int64s | None:
    """Offsets of the dicts with a first key; None if they are shorter than events of recordings."""
    middle = len(data) // 2 // _BYTES_AT_ONCE * _BYTES_AT_ONCE
    bounds = [0, middle, len(data)] if middle else [0, len(data)]
    found = at_once([partial(_starts_within, data, first_key, *pair) for pair in pairwise(bounds)])
    starts = [each for each in found if each is not None]
    return np.concatenate(starts) if len(starts) == len(found) else None


def _starts_within(data: Bytes, first_key: int, begin: int, end: int) -> Int64s | None:
    # arrays take about as many bytes per dict
    starts = np.empty((end - begin) // _SHORTEST_EVENT_BYTES + LEAST_ALIKE, dtype=np.int64)
    count = 0
    is_brace = np.empty(min(_BYTES_AT_ONCE, end - begin), dtype=bool)
    for start in range(begin, end, _BYTES_AT_ONCE):
        heads, keys = _heads(data, start, is_brace)
        found = heads[keys == first_key]
        if count + len(found) > len(starts):
            return None
        starts[count : count + len(found)] = found
        count += len(found)
    return starts[:count]


def _most_frequent_keys(data: Bytes, starts: Int64s) -> tuple[int, ...] | None:
    """The most frequent keys of the dicts, judged by samples that can be read; None without any."""
    samples: Counter[tuple[int, ...]] = Counter()
    for place in range(0, len(starts) - 1, max(1, len(starts) // _SAMPLES)):
        start, end = int(starts[place]), int(starts[place + 1])
        layout = read_layout(data[start : min(end, start + _SAMPLE_BYTES)].tobytes())
        if layout is not None and len(layout.keys) <= _MOST_KEYS:
            samples[layout.keys] += 1
    return samples.most_common(1)[0][0] if samples else None


def _most_frequent_first_key(data: Bytes) -> int | None:
    """The most frequent first key of dicts, judged by samples from all parts of the data."""
    is_brace = np.empty(_SAMPLE_BYTES, dtype=bool)
    samples: Counter[int] = Counter()
    for start in range(0, len(data), max(_SAMPLE_BYTES, len(data) // _SAMPLES)):
        _, keys = _heads(data, start, is_brace)
        samples.update(keys.tolist())
    del samples[_NO_REFERENCE]
    return samples.most_common(1)[0][0] if samples else None


def _heads(data: Bytes, start: int, is_brace: npt.NDArray[np.bool_]) -> tuple[Int64s, npt.NDArray[np.uint64]]:
    """Offsets of all byte sequences in a piece of a pickle that look like the head of a dict, and their first keys.

    Args:
        is_brace: overwritten; as long as the piece. New memory for each piece would take longer than its search.

    Returns:
        For each head its offset and the opcode that refers to its first key, or _NO_REFERENCE for another opcode.
    """
    stop = min(start + len(is_brace), len(data) - _LONGEST_HEAD_BYTES)
    if stop <= start:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint64)
    braces = np.flatnonzero(np.equal(data[start:stop], _DICT, out=is_brace[: stop - start]))
    braces += start
    marks = braces + 1
    marks += PUT_BYTES[data[marks]]
    kept = data[marks] == MARK
    keys = np.ndarray((len(data) - WORD_BYTES + 1,), np.uint64, data, strides=(1,))[marks[kept] + 1]
    return braces[kept], keys & _FIRST_BYTES[_REFERENCE_BYTES[keys & 0xFF]]


class _Cutter:
    """Reads dicts in two threads, then cuts them out of the pickle.

    Args:
        keys: memo indices of the keys; dicts with others are not read.
    """

    def __init__(self, data: Bytes, starts: Int64s, keys: tuple[int, ...]) -> None:
        self.data, self.starts, self.keys = data, starts, keys
        # the end of the last dict is unknown, so it stays in the rest
        self.ends = np.append(starts[1:], starts[-1:])
        # each part fills its share of these, unless its values need more bits
        columns: list[Column] = [np.empty(len(starts), dtype=np.int32) for _ in keys]
        bounds = [0, len(starts) // 2, len(starts)] if len(starts) >= _LEAST_IN_THREADS else [0, len(starts)]
        shares = [slice(*pair) for pair in pairwise(bounds)]
        parts = [
            Rows(data, starts[share], self.ends[share], keys, [column[share] for column in columns]) for share in shares
        ]
        at_once([part.read for part in parts])
        self.columns = [
            _joined(column, [part.columns[place] for part in parts]) for place, column in enumerate(columns)
        ]
        self.was_read = np.concatenate([part.was_read for part in parts])
        self.is_gone = np.concatenate([part.is_gone for part in parts])
        self.gap_starts = [gaps for part in parts for gaps in part.gap_starts]
        self.gap_ends = [gaps for part in parts for gaps in part.gap_ends]
        self.layouts = [layout for part in parts for layout in part.layouts]
        before = [0, *accumulate(len(part.layouts) for part in parts)]
        self.layout_of = np.concatenate([part.layout_of + count for part, count in zip(parts, before, strict=False)])
        self.copies = np.concatenate([share.start + part.copies for part, share in zip(parts, shares, strict=True)])
        self.originals = np.concatenate(
            [share.start + part.originals for part, share in zip(parts, shares, strict=True)]
        )

    def cut(self) -> Cut | None:
        """Cut out the dicts that were read; None if there are none, or a memo index is impossible."""
        if not self.was_read.any():
            return None
        first_uses = self._first_uses()
        if first_uses is None:
            return None
        references = np.flatnonzero(first_uses < len(self.starts)).astype(np.int64)
        self._keep_lookups(first_uses)
        self._write_numbers()
        self._leave_out_runs()
        rest = b"".join(self._rest())
        follows = self.is_gone & np.append(False, self.is_gone[:-1])
        marks = np.flatnonzero((self.was_read & ~follows)[self.was_read])
        places = np.flatnonzero(self.was_read)
        return Cut(
            rest=rest,
            counts=np.diff(marks, append=len(places)),
            keys=self.keys,
            columns=self.columns,
            places=places,
            references=references,
            copies=self.copies,
            originals=self.originals,
        )

    def _first_uses(self) -> npt.NDArray[np.int32] | None:
        """The first dict that refers to each memo index, or the number of dicts; None if an index is too large."""
        highest = max((FIRST_REFERENCE - int(column.min()) for column in self.columns), default=-1)
        # each object takes at least a byte
        if highest > len(self.data):
            return None
        # the last entry is of the cells that are not references
        found = np.full(max(0, highest + 1) + 1, len(self.starts), dtype=np.int32)
        for column in self.columns:
            if column.min() <= FIRST_REFERENCE:
                uses = np.full_like(found, len(self.starts))
                # of several rows with the same index, the last one that is assigned stays
                uses[FIRST_REFERENCE - np.minimum(column, KEPT)[::-1]] = np.arange(len(column))[::-1]
                np.minimum(found, uses, out=found)
        return found[:-1]

    def _keep_lookups(self, first_uses: npt.NDArray[np.int32]) -> None:
        """Leave each reference in the rest where a dict first uses it, so that one to a later object fails there."""
        starts = np.array([[value.start for value in layout.values] for layout in self.layouts])
        ends = np.array([[value.start + value.size for value in layout.values] for layout in self.layouts])
        rows, begins, stops = [], [], []
        memo_indices = np.flatnonzero(first_uses < len(self.starts))
        first_rows = first_uses[memo_indices]
        for place, column in enumerate(self.columns):
            using = np.sort(first_rows[column[first_rows] == FIRST_REFERENCE - memo_indices]).astype(np.int64)
            rows.append(using)
            # the opcode is before the argument
            begins.append(self.starts[using] + starts[self.layout_of[using], place] - 1)
            stops.append(self.starts[using] + ends[self.layout_of[using], place])
        self._divide_runs(np.concatenate(rows), np.concatenate(begins))
        self.gap_ends += begins
        for stop in stops:
            # another key or the end of the dict follows, and is cut out
            self.data[stop] = _POP
            self.gap_starts.append(stop + 1)

    def _divide_runs(self, rows: Int64s, begins: Int64s) -> None:
        """Take the dicts with a lookup out of runs whose MEMOIZE opcodes would overwrite one.

        Args:
            rows: the dicts.
            begins: where their lookups begin.
        """
        edges = self._runs()
        begins, rows = begins[self.is_gone[rows]], rows[self.is_gone[rows]]
        runs = np.searchsorted(edges[:, 0], rows, side="right") - 1
        memoized = self.starts[edges[runs, 0]] + len(NUMBER) + edges[runs, 1] - edges[runs, 0]
        is_hit = np.zeros(len(edges), dtype=bool)
        is_hit[runs[begins < memoized]] = True
        rows = distinct(rows[is_hit[runs]])
        self.is_gone[rows] = False
        self.gap_starts.append(self.starts[rows] + 2 + GROWTH)
        self.gap_ends.append(self.ends[rows])

    def _write_numbers(self) -> None:
        """Replace the opcode of each dict that keeps a place in the rest by a number; what memoizes it moves back."""
        follows = self.is_gone & np.append(False, self.is_gone[:-1])
        stays = np.flatnonzero(self.was_read & ~follows)
        put_bytes = np.array([layout.body - 1 for layout in self.layouts])[self.layout_of[stays]]
        for size in distinct(put_bytes).tolist():
            width = len(NUMBER) + size
            windows = np.ndarray((len(self.data) - width + 1,), f"V{width}", self.data, strides=(1,))
            starts = self.starts[stays[put_bytes == size]]
            heads = windows[starts].view(np.uint8).reshape(-1, width)
            heads[:, len(NUMBER) :] = heads[:, 1 : 1 + size].copy()
            heads[:, : len(NUMBER)] = np.frombuffer(NUMBER, dtype=np.uint8)
            windows[starts] = heads.view(windows.dtype)[:, 0]

    def _runs(self) -> Int64s:
        """First and end of each run of adjacent dicts that leave nothing in the rest."""
        return np.flatnonzero(np.diff(self.is_gone, prepend=False, append=False)).reshape(-1, 2)

    def _leave_out_runs(self) -> None:
        """Replace each run of adjacent dicts by a number and as many MEMOIZE opcodes, which keeps memo indices."""
        edges = self._runs()
        starts, counts = self.starts[edges[:, 0]], edges[:, 1] - edges[:, 0]
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
            self.data[start + len(NUMBER) : start + len(NUMBER) + count] = MEMOIZE
        self.gap_starts.append(starts + len(NUMBER) + counts)
        self.gap_ends.append(self.ends[edges[:, 1] - 1])

    def _rest(self) -> Iterator[bytes]:
        """The bytes between the gaps; gaps do not overlap, so sorted starts and sorted ends match."""
        starts = np.sort(np.concatenate(self.gap_starts), kind="stable")
        ends = np.sort(np.concatenate(self.gap_ends), kind="stable")
        yield self.data[: int(starts[0])].tobytes()
        for first in range(0, len(starts) - 1, ROWS_AT_ONCE):
            begins = ends[first : min(first + ROWS_AT_ONCE, len(starts) - 1)]
            sizes = starts[first + 1 : first + 1 + len(begins)] - begins
            if int(sizes.sum()) > _BYTES_AT_ONCE:
                # long texts; an index takes eight times their memory
                for begin, end in zip(begins.tolist(), (begins + sizes).tolist(), strict=True):
                    yield self.data[begin:end].tobytes()
                continue
            before = np.cumsum(sizes) - sizes
            places = np.repeat(begins - before, sizes) + np.arange(int(sizes.sum()))
            yield self.data[places].tobytes()
        yield self.data[int(ends[-1]) :].tobytes()


def _joined(whole: Column, parts: Sequence[Column]) -> Column:
    """A column whose parts were read one by one; `whole` has all of those that were not replaced by wider ones."""
    if all(part.dtype == whole.dtype for part in parts):
        return whole
    return parts[0] if len(parts) == 1 else np.concatenate(parts, dtype=np.int64)
