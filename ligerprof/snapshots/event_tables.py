"""Read the dicts of a pickle that share their keys as columns, from their bytes, and cut them out of the pickle."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ligerprof.snapshots.trace import Bytes, Flags, Int64s, groups

_DICT, _LIST, _MARK, _SET_ITEMS, _POP = (ord(opcode) for opcode in "}](u0")
_LONG1, _TUPLE2, _SHORT_TEXT, _TEXT = 0x8A, 0x86, 0x8C, ord("X")
# bytes of the argument, by opcode: BININT1, BININT2, BININT, BINGET and LONG_BINGET; LONG1 has its length before it
_ARGUMENT_BYTES = np.zeros(256, dtype=np.int64)
_ARGUMENT_BYTES[[ord(opcode) for opcode in "KMJhj"]] = 1, 2, 4, 1, 4
_IS_REFERENCE, _IS_NUMBER = (np.isin(np.arange(256), [ord(each) for each in opcodes]) for opcodes in ("hj", "KMJ\x8a"))
# bytes of the opcode that memoizes: MEMOIZE, BINPUT, LONG_BINPUT, or none
_PUT_BYTES = np.zeros(256, dtype=np.int64)
_PUT_BYTES[[0x94, ord("q"), ord("r")]] = 1, 2, 5
_WORD_BYTES = 8
# by number of bytes: a mask of them in a word, and the largest number that they hold with a sign; none has nine bytes
_LOW_BYTES = np.array([2 ** (8 * size) - 1 for size in range(_WORD_BYTES)] + [-1, -1], dtype=np.int64)
_LARGEST = np.array([0] + [2 ** (8 * size - 1) - 1 for size in range(1, _WORD_BYTES + 1)] + [-1], dtype=np.int64)
# what a column holds until it is complete, in place of a number: _KEPT for a value that stays, or -2 - memo index
_KEPT, _FIRST_REFERENCE = -1, -2
# what replaces a dict: a number that Python does not share, so that other references to it can be counted
_NUMBER = b"M\xff\xff"
# bytes that its head, which is the opcode of the dict, grows by
_GROWTH = len(_NUMBER) - 1
_LEAST_ALIKE = 4
# pieces that fit in the processor's caches
_BYTES_AT_ONCE, _ROWS_AT_ONCE = 2**21, 2**13
# parts of a pickle that are searched for its most frequent dict, and their size
_SAMPLES, _SAMPLE_BYTES = 64, 2**13
_LONGEST_HEAD_BYTES = 16
# limits on memory that recordings do not reach
_SHORTEST_EVENT_BYTES, _MOST_KEYS = 24, 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """A pickle without the dicts that were read from its bytes.

    Attributes:
        rest: the pickle with a number in place of each dict that was read, followed by its kept values: texts, pairs,
            and the list that may be the last value.
        keys: memo indices of the keys.
        columns: one row per key: numbers, -1 - i for the i-th of `references`, and, counted on, kept values in order.
        places: rows of the dicts that were read, ascending; the other rows are 0.
        references: the memo indices that columns refer to, ascending. The rest looks each up where it is first used.
        kept: number of kept values.
        copies: rows whose last value is a list equal to another's, and was cut empty.
        originals: rows of those others.
    """

    rest: bytes
    keys: Int64s
    columns: list[Int64s]
    places: Int64s
    references: Int64s
    kept: int
    copies: Int64s
    originals: Int64s


def cut_alike(data: Bytes) -> Cut | None:
    """Cut the dicts with the most frequent keys out of a pickle without frames; None if there are too few of them.

    Text that imitates a dict is detected when the rest is loaded: the counts then differ.

    Args:
        data: the pickle's bytes, overwritten.
    """
    first_key = _most_frequent_first_key(data)
    starts = None if first_key is None else _starts(data, first_key)
    return None if starts is None or len(starts) < _LEAST_ALIKE else _Cutter(data, starts).cut()


def _most_frequent_first_key(data: Bytes) -> int | None:
    """The most frequent first key of dicts, judged by samples from all parts of the data."""
    samples: Counter[int] = Counter()
    for start in range(0, len(data), max(_SAMPLE_BYTES, len(data) // _SAMPLES)):
        samples.update(_heads(data, start, _SAMPLE_BYTES)[1].tolist())
    del samples[0]
    return samples.most_common(1)[0][0] if samples else None


def _starts(data: Bytes, first_key: int) -> Int64s | None:
    """Offsets of the dicts with a first key; None if they are shorter than events of recordings."""
    found, count = [], 0
    for start in range(0, len(data), _BYTES_AT_ONCE):
        heads, keys = _heads(data, start, _BYTES_AT_ONCE)
        found.append(heads[keys == first_key])
        count += len(found[-1])
        # arrays take about as many bytes per dict
        if count > len(data) // _SHORTEST_EVENT_BYTES + _LEAST_ALIKE:
            return None
    return np.concatenate(found) if found else None


def _heads(data: Bytes, start: int, size: int) -> tuple[Int64s, Int64s]:
    """Offsets of all bytes in a piece of a pickle that look like the head of a dict, and the references to their keys.

    Returns:
        For each head its offset, and the bytes of the opcode that refers to its first key; 0 for another opcode.
    """
    stop = min(start + size, len(data) - _LONGEST_HEAD_BYTES)
    braces = start + np.flatnonzero(data[start : max(start, stop)] == _DICT)
    marks = braces + 1 + _PUT_BYTES[data[braces + 1]]
    is_head = data[marks] == _MARK
    return braces[is_head], _reference_at(_words(data), marks[is_head] + 1)


def _words(data: Bytes) -> Int64s:
    """The eight bytes at each offset, which need not be aligned."""
    return np.ndarray((max(0, len(data) - _WORD_BYTES + 1),), np.int64, data, strides=(1,))


def _reference_at(words: Int64s, at: Int64s) -> Int64s:
    """The bytes of the reference at each offset, with its opcode; 0 for any other opcode."""
    found = words[at]
    opcodes = found & 0xFF
    return found & np.where(_IS_REFERENCE[opcodes], _LOW_BYTES[1 + _ARGUMENT_BYTES[opcodes]], 0)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Read:
    """Dicts that were read.

    Attributes:
        rows: of these dicts.
        marks: offset of the MARK of each.
        ends: offset of the opcode that sets the items.
        cells: for each key the values.
        spans: for each key, where each value starts and ends.
        contents: offset of the last value's items, 0 unless it is a list.
    """

    rows: Int64s
    marks: Int64s
    ends: Int64s
    cells: list[Int64s]
    spans: list[tuple[Int64s, Int64s]]
    contents: Int64s


class _Cutter:
    """Reads dicts key by key, all of them at once, and cuts them out of the pickle.

    Args:
        starts: offset of each dict. Where the last one ends is unknown, so it stays in the rest.
    """

    def __init__(self, data: Bytes, starts: Int64s) -> None:
        self.data, self.starts, self.words = data, starts, _words(data)
        self.keys = self._most_frequent_keys()
        self.columns = [np.zeros(len(starts), dtype=np.int64) for _ in self.keys]
        self.gap_starts: list[Int64s] = []
        self.gap_ends: list[Int64s] = []

    def cut(self) -> Cut | None:
        """Cut out the dicts that can be read; None if there are none, or a memo index is impossible."""
        if not self.keys:
            return None
        lists, is_read = [], np.zeros(len(self.starts), dtype=bool)
        for first in range(0, len(self.starts) - 1, _ROWS_AT_ONCE):
            rows = np.arange(first, min(first + _ROWS_AT_ONCE, len(self.starts) - 1))
            read = self._read(rows)
            for column, cells in zip(self.columns, read.cells, strict=True):
                column[read.rows] = cells
            self._leave_out(read)
            is_read[read.rows] = True
            with_list = np.flatnonzero(read.contents)
            lists.append(np.stack([read.rows, read.contents, read.ends])[:, with_list])
        places = np.flatnonzero(is_read)
        rows, contents, ends = np.concatenate(lists, axis=1)
        first_uses = self._first_uses()
        if not len(places) or first_uses is None:
            return None
        copies, originals = _equal_lists(self.data, contents, ends - contents)
        self.gap_starts.append(contents[copies])
        self.gap_ends.append(ends[copies])
        self._keep_lookups(first_uses)
        self._write_numbers(self.starts[places])
        references = np.flatnonzero(first_uses < len(self.starts))
        return Cut(
            rest=b"".join(self._rest()),
            keys=np.array([key >> 8 for key in self.keys], dtype=np.int64),
            columns=self.columns,
            places=places,
            references=references,
            kept=self._number_cells(references),
            copies=rows[copies],
            originals=rows[originals],
        )

    def _most_frequent_keys(self) -> tuple[int, ...]:
        """The references to the keys of most dicts, judged by samples; none without samples that can be read."""
        chosen = np.arange(0, len(self.starts) - 1, max(1, len(self.starts) // _SAMPLES))
        at, limits = self._marks(chosen) + 1, self.starts[chosen + 1]
        keys: list[int] = []
        while len(at):
            key, _ = Counter(_reference_at(self.words, at).tolist()).most_common(1)[0]
            if not key or len(keys) == _MOST_KEYS:
                break
            alike = _reference_at(self.words, at) == key
            keys.append(key)
            start = at[alike] + _size_of(key)
            if 2 * np.count_nonzero(self.data[start] == _LIST) > len(start):
                # a list can only be read as the last value
                break
            _, at = self._values(start, limits[alike])
            at, limits = at[at > start], limits[alike][at > start]
        return tuple(keys)

    def _marks(self, rows: Int64s) -> Int64s:
        """Offset of the MARK of each dict."""
        starts = self.starts[rows]
        return starts + 1 + _PUT_BYTES[self.data[starts + 1]]

    def _read(self, rows: Int64s) -> _Read:
        """Those of the dicts whose keys are `keys`, and whose values are numbers, references, or can be kept."""
        limits, marks = self.starts[rows + 1], self._marks(rows)
        at, is_read = marks + 1, np.ones(len(rows), dtype=bool)
        cells, spans = [], []
        is_list = np.zeros(len(rows), dtype=bool)
        for number, key in enumerate(self.keys, 1):
            is_read &= (self.words[at] & _LOW_BYTES[_size_of(key)]) == key
            at = np.minimum(at + _size_of(key), limits)
            found, ends = self._values(at, limits)
            if number == len(self.keys):
                is_list = self.data[at] == _LIST
                contents = np.where(is_list, at + 1 + _PUT_BYTES[self.data[at + 1]], 0)
                ends = np.where(is_list, self._tails(limits), ends)
            is_read &= ends > at
            cells.append(found)
            spans.append((at, ends))
            at = ends
        is_read &= (self.data[at] == _SET_ITEMS) & (~is_list | (contents <= at))
        chosen = slice(None) if is_read.all() else is_read
        return _Read(
            rows=rows[chosen],
            marks=marks[chosen],
            ends=at[chosen],
            cells=[found[chosen] for found in cells],
            spans=[(start[chosen], end[chosen]) for start, end in spans],
            contents=contents[chosen],
        )

    def _values(self, at: Int64s, limits: Int64s) -> tuple[Int64s, Int64s]:
        """The cell of the value at each offset, and its end, which is the offset itself if it cannot be read."""
        cells, ends = self._plain(at)
        pairs = np.flatnonzero(_IS_NUMBER[self.data[ends]])
        pairs = pairs[_IS_NUMBER[self.data[at[pairs]]] & (ends[pairs] > at[pairs])]
        if len(pairs):
            _, after = self._plain(np.minimum(ends[pairs], limits[pairs]))
            is_pair = self.data[after] == _TUPLE2
            cells[pairs], ends[pairs] = _KEPT, np.where(is_pair, self._after_put(after + 1), at[pairs])
        texts = np.flatnonzero(ends == at)
        if len(texts):
            start, found = at[texts], self.words[at[texts]]
            is_short = found & 0xFF == _SHORT_TEXT
            after = start + np.where(is_short, 2 + (found >> 8 & 0xFF), 5 + (found >> 8 & _LOW_BYTES[4]))
            is_text = (is_short | (found & 0xFF == _TEXT)) & (after < limits[texts])
            cells[texts] = _KEPT
            ends[texts] = np.where(is_text, self._after_put(np.where(is_text, after, start)), start)
        return cells, np.minimum(ends, limits)

    def _plain(self, at: Int64s) -> tuple[Int64s, Int64s]:
        """The number, or the reference, at each offset, and its end; the offset itself for any other value."""
        found = self.words[at]
        opcodes, digits = found & 0xFF, found >> 8
        # most keys have one opcode in all dicts
        opcodes = opcodes[:1] if (opcodes == opcodes[:1]).all() else opcodes
        is_long, sizes = opcodes == _LONG1, _ARGUMENT_BYTES[opcodes]
        if is_long.any():
            sizes = np.where(is_long, np.minimum(digits & 0xFF, _WORD_BYTES + 1), sizes)
            digits = np.where(is_long, self.words[at + 2], digits)
        digits &= _LOW_BYTES[sizes]
        is_signed = is_long | (opcodes == ord("J"))
        is_known = (is_long | (sizes > 0)) & (~is_signed | ((digits >= 0) & (digits <= _LARGEST[sizes])))
        ends = np.where(is_known, at + 1 + is_long + sizes, at)
        return np.where(_IS_REFERENCE[opcodes], _FIRST_REFERENCE - digits, digits), ends

    def _after_put(self, at: Int64s) -> Int64s:
        return at + _PUT_BYTES[self.data[at]]

    def _tails(self, limits: Int64s) -> Int64s:
        """Offset of each dict's end: right before the next dict, or before a new batch of the list; else 0."""
        at_once = self.data[limits - 1] == _SET_ITEMS
        batch = (self.data[limits - 3] == _SET_ITEMS) & (self.data[limits - 2] == ord("e"))
        batch &= self.data[limits - 1] == _MARK
        return np.where(at_once, limits - 1, np.where(batch, limits - 3, 0))

    def _leave_out(self, read: _Read) -> None:
        """Note the gaps that leave only kept values of each dict, behind the number that replaces it."""
        self.gap_starts.append(read.marks + _GROWTH)
        self.gap_ends.append(read.ends + 1)
        for cells, (starts, ends) in zip(read.cells, read.spans, strict=True):
            self.gap_ends.append(starts[cells == _KEPT])
            self.gap_starts.append(ends[cells == _KEPT])

    def _first_uses(self) -> npt.NDArray[np.int32] | None:
        """The first dict that refers to each memo index, or the number of dicts; None if an index is too large."""
        highest = max((_FIRST_REFERENCE - int(column.min()) for column in self.columns), default=-1)
        # each object takes at least a byte
        if highest > len(self.data):
            return None
        found = np.full(max(0, highest + 1), len(self.starts), dtype=np.int32)
        for column in self.columns:
            rows = np.flatnonzero(column <= _FIRST_REFERENCE)[::-1]
            # of several rows with the same index, the last one that is assigned stays
            first = np.full_like(found, len(self.starts))
            first[_FIRST_REFERENCE - column[rows]] = rows
            np.minimum(found, first, out=found)
        return found

    def _keep_lookups(self, first_uses: npt.NDArray[np.int32]) -> None:
        """Leave each reference in the rest where a dict first uses it, so that one to a later object fails there."""
        read = self._read(np.unique(first_uses[first_uses < len(self.starts)]).astype(np.int64))
        for cells, (starts, ends) in zip(read.cells, read.spans, strict=True):
            references = np.flatnonzero(cells <= _FIRST_REFERENCE)
            is_first = first_uses[_FIRST_REFERENCE - cells[references]] == read.rows[references]
            chosen = references[is_first]
            # another key or the end of the dict follows, and is cut out
            self.data[ends[chosen]] = _POP
            self.gap_ends.append(starts[chosen])
            self.gap_starts.append(ends[chosen] + 1)

    def _write_numbers(self, starts: Int64s) -> None:
        """Replace the opcode of each dict by a number; what memoizes it moves back."""
        sizes = _PUT_BYTES[self.data[starts + 1]]
        for place in reversed(range(int(sizes.max()))):
            moved = starts[sizes > place] + 1 + place
            self.data[moved + _GROWTH] = self.data[moved]
        for place, byte in enumerate(_NUMBER):
            self.data[starts + place] = byte

    def _number_cells(self, references: Int64s) -> int:
        """Number references and kept values in the columns as in `Cut`; returns the number of kept values."""
        index_of = np.zeros(int(references[-1]) + 1 if len(references) else 0, dtype=np.int64)
        index_of[references] = np.arange(len(references))
        number = np.zeros(len(self.starts) + 1, dtype=np.int64)
        for column in self.columns:
            number[1:] += column == _KEPT
        np.cumsum(number, out=number)
        number += len(references)
        for column in self.columns:
            referring, kept = np.flatnonzero(column <= _FIRST_REFERENCE), np.flatnonzero(column == _KEPT)
            column[referring] = -1 - index_of[_FIRST_REFERENCE - column[referring]]
            column[kept] = -1 - number[kept]
            number[kept] += 1
        return int(number[-1]) - len(references)

    def _rest(self) -> Iterator[bytes]:
        """The bytes between the gaps; gaps do not overlap, so sorted starts and sorted ends match."""
        starts, ends = np.concatenate(self.gap_starts), np.concatenate(self.gap_ends)
        starts.sort(kind="stable")
        ends.sort(kind="stable")
        yield self.data[: int(starts[0])].tobytes()
        for first in range(0, len(starts) - 1, _ROWS_AT_ONCE):
            begins = ends[first : min(first + _ROWS_AT_ONCE, len(starts) - 1)]
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


def _size_of(reference: int) -> int:
    """Bytes of a reference, with its opcode."""
    return 1 + int(_ARGUMENT_BYTES[reference & 0xFF])


# the contents of a list that holds only references: several between MARK and APPENDS, or one and APPEND
_REFERENCES = re.compile(rb"(?s)\((?:j.{4}|h.)+e|(?:j.{4}|h.)a")
_ODD_NUMBER = 0x9E3779B97F4A7C15


def _equal_lists(data: Bytes, contents: Int64s, sizes: Int64s) -> tuple[Int64s, Int64s]:
    """Find lists of references whose bytes equal an earlier list's.

    torch writes a new list for every allocation, and most allocations come from a few stacks.

    Args:
        contents: offset of each list's items; the data goes on for a word after each list.
        sizes: bytes of the items of each.

    Returns:
        Indices of the copies and of each one's original; no list is both.
    """
    copies, originals = [sizes[:0]], [sizes[:0]]
    for lists in groups(np.arange(len(sizes)), sizes):
        if len(lists) >= _LEAST_ALIKE and (size := int(sizes[lists[0]])) > 0:
            alike, first = _equal_parts(data, contents[lists], size)
            copies.append(lists[alike])
            originals.append(lists[first])
    return np.concatenate(copies), np.concatenate(originals)


def _equal_parts(data: Bytes, contents: Int64s, size: int) -> tuple[Int64s, Int64s]:
    """The same for lists of one size."""
    width = -(-size // _WORD_BYTES)
    windows = np.ndarray((len(data) - width * _WORD_BYTES + 1,), f"V{width * _WORD_BYTES}", data, strides=(1,))
    words = windows[contents].view(np.uint64).reshape(-1, width)
    words[:, -1] &= np.uint64(2 ** (8 * (size - (width - 1) * _WORD_BYTES)) - 1)
    # the sums of different lists rarely collide; the lists themselves are compared below
    sums = words @ np.cumprod(np.full(width, _ODD_NUMBER, dtype=np.uint64))
    _, firsts, group = np.unique(sums, return_index=True, return_inverse=True)
    texts = (data[start : start + size].tobytes() for start in contents[firsts].tolist())
    refers = np.array([_REFERENCES.fullmatch(text) is not None for text in texts], dtype=bool)
    first = firsts[group]
    alike: Flags = refers[group] & (words == words[first]).all(axis=1)
    alike[firsts] = False
    copies = np.flatnonzero(alike)
    return copies, first[copies]
