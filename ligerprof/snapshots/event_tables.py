"""Read the dicts of a pickle that share a layout as columns, from their bytes, and cut them out of the pickle."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ligerprof.snapshots.trace import Bytes, Column, Int64s, distinct

_PUT = rb"(?:\x94|q.|r.{4})?"
_INTEGER = rb"(?:K.|M..|J.{4}|\x8a(?:\x01.|\x02..|\x03...|\x04.{4}|\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}))"
_HEAD = re.compile(rb"(?s)\}(?P<put>" + _PUT + rb")\(")
_REFERENCE = re.compile(rb"(?s)h(.)|j(.{4})")
_PLAIN_VALUE = re.compile(
    rb"(?s)(?:" + _INTEGER * 2 + rb"\x86|\](?=" + _PUT + rb"u))(?P<put>" + _PUT + rb")"
    rb"|(?P<number>" + _INTEGER + rb")|(?P<reference>h.|j.{4})|(?P<open>\])"
)
_TEXT = re.compile(rb"(?s)\x8c(?P<short>.)|X(?P<long>.{4})")
_TEXT_PUT = re.compile(rb"(?s)" + _PUT)
_SET_ITEMS = b"u"
# LONG1 has a length before its digits
_NUMBER_ARGUMENT = {b"K": 1, b"M": 1, b"J": 1, b"\x8a": 2}
_UNSIGNED = b"KM"
_SIGN_BIT = 0x80
WORD_BYTES = 8


class ValueKind(Enum):
    """How the value of a key is pickled."""

    NUMBER = auto()
    REFERENCE = auto()
    # text, a list or a pair that is written in the event itself
    KEPT = auto()


class ValueSpan(NamedTuple):
    """Where the value of one key is, within the event.

    Attributes:
        start: offset of a number's digits, of a reference's memo index, or of the whole kept value.
        size: in bytes; 0 for an open list.
    """

    kind: ValueKind
    start: int
    size: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Layout:
    """The bytes of a dict whose keys are references.

    Attributes:
        keys: memo indices of the keys, in the order of `values`.
        body: offset of the dict's MARK, after the opcode that memoizes the dict.
        size: bytes up to the end of the dict, or up to its last value if `is_open`.
        is_open: whether the last value is a list that is not empty, of any length.
        mask: bits that are equal in all dicts of this layout, in words.
    """

    keys: tuple[int, ...]
    values: tuple[ValueSpan, ...]
    body: int
    size: int
    is_open: bool
    mask: npt.NDArray[np.uint64]

    @property
    def padded_size(self) -> int:
        """Bytes in whole words plus one, so that any value can be read as a word."""
        return len(self.mask) * WORD_BYTES

    @property
    def is_memoized_alone(self) -> bool:
        """Whether MEMOIZE memoizes the dict and all of its values are read."""
        return self.body == 2 and not any(value.kind is ValueKind.KEPT for value in self.values)

    def gaps(self, start: int) -> Iterator[tuple[int, int]]:
        """Start and end of each part from `start` on to cut out, which leaves only kept values."""
        for value in self.values:
            if value.kind is ValueKind.KEPT:
                yield start, value.start
                start = value.start + value.size
        if not self.is_open:
            yield start, self.size


def read_layout(event: bytes) -> Layout | None:
    """The layout of the dict at the start of `event`; None if a key or value is of another kind."""
    return _Reader(event).read()


class _Reader:
    """Reads one dict token by token and collects the bytes that may differ."""

    def __init__(self, event: bytes) -> None:
        self.event = event
        self.keys: list[int] = []
        self.values: list[ValueSpan] = []
        self.free: list[tuple[int, int]] = []
        self.signs: list[int] = []

    def read(self) -> Layout | None:
        head = _HEAD.match(self.event)
        if head is None:
            return None
        self._frees_put(*head.span("put"))
        position, is_open = head.end(), False
        while not is_open and (key := _REFERENCE.match(self.event, position)):
            self.keys.append(int.from_bytes(key[1] or key[2], "little"))
            end = self._text(key.end()) or self._plain(key.end())
            if end is None:
                return None
            is_open = end == key.end()
            position = end
        if not is_open and self.event[position : position + 1] != _SET_ITEMS:
            return None
        if not self.values or any(self.event[sign] & _SIGN_BIT for sign in self.signs):
            return None
        size = position + (not is_open)
        return Layout(
            keys=tuple(self.keys),
            values=tuple(self.values),
            body=head.end("put"),
            size=size,
            is_open=is_open,
            mask=self._mask(size),
        )

    def _plain(self, start: int) -> int | None:
        """Read a value other than text; returns its end, or `start` for an open list."""
        found = _PLAIN_VALUE.match(self.event, start)
        if found is None:
            return None
        if found["number"]:
            argument = start + _NUMBER_ARGUMENT[found[0][:1]]
            self._argument(ValueKind.NUMBER, argument, found.end())
            if found[0][0] not in _UNSIGNED:
                self.signs.append(found.end() - 1)
        elif found["reference"]:
            self._argument(ValueKind.REFERENCE, start + 1, found.end())
        elif found["open"]:
            self.values.append(ValueSpan(ValueKind.KEPT, start, 0))
            return start
        else:
            # the same few pairs recur, so their bytes are part of the layout
            self.values.append(ValueSpan(ValueKind.KEPT, start, found.end() - start))
            self._frees_put(*found.span("put"))
        return found.end()

    def _text(self, start: int) -> int | None:
        found = _TEXT.match(self.event, start)
        if found is None:
            return None
        length = int.from_bytes(found["short"] or found["long"], "little")
        put = _TEXT_PUT.match(self.event, found.end() + length)
        if put is None:
            return None
        self.values.append(ValueSpan(ValueKind.KEPT, start, put.end() - start))
        self.free.append((found.end(), put.start()))
        self._frees_put(*put.span())
        return put.end()

    def _argument(self, kind: ValueKind, start: int, end: int) -> None:
        self.values.append(ValueSpan(kind, start, end - start))
        self.free.append((start, end))

    def _frees_put(self, start: int, end: int) -> None:
        """Free the argument of a memoizing opcode; the opcode itself belongs to the layout."""
        self.free.append((min(start + 1, end), end))

    def _mask(self, size: int) -> npt.NDArray[np.uint64]:
        mask = bytearray((-(-size // WORD_BYTES) + 1) * WORD_BYTES)
        mask[:size] = b"\xff" * size
        for start, end in self.free:
            mask[start:end] = bytes(end - start)
        # negative numbers have another layout, which is not read
        for sign in self.signs:
            mask[sign] = _SIGN_BIT
        return np.frombuffer(bytes(mask), dtype=np.uint64)


# the contents of a list that holds only references: several between MARK and APPENDS, or one and APPEND
_REFERENCES = re.compile(rb"(?s)\((?:j.{4}|h.)+e|(?:j.{4}|h.)a")
_ODD_NUMBER = 0x9E3779B97F4A7C15


def equal_lists(data: Bytes, contents: Int64s, size: int) -> tuple[Int64s, Int64s]:
    """Find lists of references whose bytes equal an earlier list's.

    Args:
        contents: offsets of the lists' contents; the data goes on for a word after each list.
        size: bytes of each list.

    Returns:
        Indices of the copies and of each one's original; no list is both.
    """
    width = -(-size // WORD_BYTES)
    windows = np.ndarray((len(data) - width * WORD_BYTES + 1,), f"V{width * WORD_BYTES}", data, strides=(1,))
    words = windows[contents].view(np.uint64).reshape(-1, width)
    words[:, -1] &= np.uint64(2 ** (8 * (size - (width - 1) * WORD_BYTES)) - 1)
    # the sums of different lists rarely collide; the lists themselves are compared below
    sums = words @ np.cumprod(np.full(width, _ODD_NUMBER, dtype=np.uint64))
    _, firsts, group = np.unique(sums, return_index=True, return_inverse=True)
    texts = (data[start : start + size].tobytes() for start in contents[firsts].tolist())
    refers = np.array([_REFERENCES.fullmatch(text) is not None for text in texts], dtype=bool)
    first = firsts[group]
    alike = refers[group] & (words == words[first]).all(axis=1)
    alike[firsts] = False
    copies = np.flatnonzero(alike)
    return copies, first[copies]


# what a column holds instead of a number: KEPT for a value that stays in the rest, or -2 - memo index
KEPT = -1
FIRST_REFERENCE = -2

MARK, SET_ITEMS = ord("("), ord("u")
# what replaces a dict: a number that Python does not share, so that other references to it can be counted
NUMBER = b"M\xff\xff"
# bytes that its head, which is the opcode of the dict, grows by
GROWTH = len(NUMBER) - 1
MEMOIZE = 0x94
# size of the memoizing instruction, by opcode: MEMOIZE, BINPUT, LONG_BINPUT, or none
PUT_BYTES = np.zeros(256, dtype=np.int64)
PUT_BYTES[[MEMOIZE, ord("q"), ord("r")]] = 1, 2, 5
# pieces that fit in the processor's caches
ROWS_AT_ONCE = 2**13
_LONGEST_EVENT_BYTES = 2**16 - 1
# a layout with fewer dicts is not worth learning; after this many failed tries the others stay
LEAST_ALIKE = 4
_MOST_FAILED_TRIES = 8
# values from this size on may not fit into 32 bits; -2 - a memo index must fit, too
_NARROW_BYTES, _MOST_NARROW = 4, 2**31 - 2
# a limit that recordings do not reach, on the bytes that are read token by token
_MOST_FAILED_BYTES = 2**21


class Rows:
    """Some dicts in a row: sorts them by length, learns the layouts of each length, and reads those that have one.

    Attributes:
        columns: a value of each dict for each key.
        was_read: whether each dict was read.
        is_gone: whether it leaves nothing in the rest, and the next dict follows directly.
        gap_starts: start of each part of the data to cut out, in no order, as are `gap_ends`.
        layouts: the layouts that were learned.
        layout_of: index into `layouts` of each dict that was read.

    Args:
        starts: offset of each dict.
        ends: offset of the next one.
        keys: memo indices of the keys; dicts with others are not read.
    """

    def __init__(self, data: Bytes, starts: Int64s, ends: Int64s, keys: tuple[int, ...]) -> None:
        self.data, self.starts, self.ends, self.keys = data, starts, ends, keys
        # narrow until a value needs more: new memory takes longer to get than to fill
        self.columns: list[Column] = [np.empty(len(starts), dtype=np.int32) for _ in keys]
        self.was_read = np.zeros(len(starts), dtype=bool)
        self.is_gone = np.zeros(len(starts), dtype=bool)
        self.gap_starts: list[Int64s] = []
        self.gap_ends: list[Int64s] = []
        self.layouts: list[Layout] = []
        self.layout_of = np.zeros(len(starts), dtype=np.int32)
        self.failed_bytes = 0
        self._copies: list[Int64s] = [starts[:0]]
        self._originals: list[Int64s] = [starts[:0]]

    def read(self) -> None:
        """Read all dicts that can be read, and overwrite the cells of the others."""
        lengths = np.minimum(self.ends - self.starts, _LONGEST_EVENT_BYTES).astype(np.uint16)
        order = np.argsort(lengths, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1):
            self._read_length(rows)
        others = np.flatnonzero(~self.was_read)
        for column in self.columns:
            column[others] = 0

    @property
    def copies(self) -> Int64s:
        """The dicts whose last value is a list equal to another's."""
        return np.concatenate(self._copies)

    @property
    def originals(self) -> Int64s:
        """Those other dicts, in the order of `copies`."""
        return np.concatenate(self._originals)

    def _read_length(self, rows: Int64s) -> None:
        """Read dicts of equal length, layout by layout; the dict in the middle likely has a frequent layout."""
        failed_tries = 0
        while len(rows) >= LEAST_ALIKE and failed_tries < _MOST_FAILED_TRIES and self.failed_bytes < _MOST_FAILED_BYTES:
            sample = len(rows) // 2
            start, end = int(self.starts[rows[sample]]), int(self.ends[rows[sample]])
            layout = read_layout(self.data[start:end].tobytes())
            alike = np.zeros(len(rows), dtype=bool)
            if layout is not None and layout.keys == self.keys:
                alike = self._read_layout(rows, layout, start)
            if np.count_nonzero(alike) < LEAST_ALIKE:
                failed_tries += 1
                self.failed_bytes += end - start
            alike[sample] = True
            rows = rows[~alike]

    def _read_layout(self, rows: Int64s, layout: Layout, sample: int) -> npt.NDArray[np.bool_]:
        """Read the rows that have the layout of the dict at `sample`; returns a mask of them."""
        size, width = layout.padded_size, len(layout.mask)
        windows = np.ndarray((max(0, len(self.data) - size + 1),), f"V{size}", self.data, strides=(1,))
        alike = self.starts[rows] < len(windows)
        if layout.is_open:
            alike &= self._tails(self.ends[rows]) >= 0
        if sample >= len(windows):
            return np.zeros_like(alike)
        likely = np.flatnonzero(alike)
        # tiled, so that one vectorized comparison covers many rows
        mask = np.tile(layout.mask, min(len(likely), ROWS_AT_ONCE))
        model = np.tile(windows[sample : sample + 1].view(np.uint64), min(len(likely), ROWS_AT_ONCE)) & mask
        for first in range(0, len(likely), ROWS_AT_ONCE):
            piece = likely[first : first + ROWS_AT_ONCE]
            words = windows[self.starts[rows[piece]]].view(np.uint64)
            differs = np.flatnonzero((words & mask[: len(words)]) != model[: len(words)]) // width
            if len(differs):
                alike[piece[differs]] = False
                words = words.reshape(-1, width)[alike[piece]]
                piece = piece[alike[piece]]
            if len(piece):
                self._fill(rows[piece], words, layout)
        self._leave_out(rows[alike], layout)
        self.was_read[rows[alike]] = True
        self.layout_of[rows[alike]] = len(self.layouts)
        self.layouts.append(layout)
        return alike

    def _fill(self, rows: Int64s, words: npt.NDArray[np.uint64], layout: Layout) -> None:
        for place, value in enumerate(layout.values):
            if value.kind is ValueKind.KEPT:
                self.columns[place][rows] = KEPT
                continue
            found = np.ndarray(len(rows), np.int64, words, value.start, (layout.padded_size,))
            numbers = found & _low_bytes(value.size)
            if value.size >= _NARROW_BYTES and self.columns[place].dtype == np.int32:
                self._widen(place, numbers)
            self.columns[place][rows] = numbers if value.kind is ValueKind.NUMBER else FIRST_REFERENCE - numbers

    def _widen(self, place: int, numbers: Int64s) -> None:
        """Give a column 64 bits per value if numbers or memo indices need them."""
        if int(numbers.max(initial=0)) > _MOST_NARROW:
            self.columns[place] = self.columns[place].astype(np.int64)

    def _leave_out(self, rows: Int64s, layout: Layout) -> None:
        starts = self.starts[rows]
        if layout.is_memoized_alone:
            self.is_gone[rows] = self.ends[rows] - starts == layout.size
            starts = starts[~self.is_gone[rows]]
        for start, end in layout.gaps(layout.body + GROWTH):
            self.gap_starts.append(starts + start)
            self.gap_ends.append(starts + end)
        if layout.is_open:
            tails = self._tails(self.ends[rows])
            self.gap_starts.append(self._leave_out_copies(rows, starts + layout.size, tails))
            self.gap_ends.append(tails + 1)

    def _leave_out_copies(self, rows: Int64s, lists: Int64s, tails: Int64s) -> Int64s:
        """Start of the gap at the end of each dict: after its last value, or inside a list that equals another's.

        torch writes a new list for every allocation, and most allocations come from a few stacks.
        """
        contents = lists + 1 + PUT_BYTES[self.data[lists + 1]]
        # dicts of equal length have lists of equal length, except before a new batch
        size = int((tails - contents).max(initial=0))
        likely = np.flatnonzero((tails - contents == size) & (contents + size + WORD_BYTES <= len(self.data)))
        if size <= 0 or len(likely) < LEAST_ALIKE:
            return tails
        alike, first_alike = equal_lists(self.data, contents[likely], size)
        copies, originals = likely[alike], likely[first_alike]
        self._copies.append(rows[copies])
        self._originals.append(rows[originals])
        gaps = tails.copy()
        gaps[copies] = contents[copies]
        return gaps

    def _tails(self, ends: Int64s) -> Int64s:
        """Offset of each dict's end: right before the next dict, or before a new batch of the list; else -1."""
        at_once = self.data[ends - 1] == SET_ITEMS
        batch = (self.data[ends - 3] == SET_ITEMS) & (self.data[ends - 2] == ord("e")) & (self.data[ends - 1] == MARK)
        return np.where(at_once, ends - 1, np.where(batch, ends - 3, -1))


def _low_bytes(size: int) -> np.int64:
    """A mask of the first bytes of a word; with all eight, the number is known to be non-negative."""
    return np.int64(2 ** (8 * size) - 1 if size < WORD_BYTES else -1)


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
    # arrays take about as many bytes per dict
    starts = np.empty(len(data) // _SHORTEST_EVENT_BYTES + LEAST_ALIKE, dtype=np.int64)
    count = 0
    is_brace = np.empty(min(_BYTES_AT_ONCE, len(data)), dtype=bool)
    for start in range(0, len(data), _BYTES_AT_ONCE):
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
    """Reads dicts, then cuts them out of the pickle.

    Args:
        keys: memo indices of the keys; dicts with others are not read.
    """

    def __init__(self, data: Bytes, starts: Int64s, keys: tuple[int, ...]) -> None:
        self.data, self.starts, self.keys = data, starts, keys
        # the end of the last dict is unknown, so it stays in the rest
        self.ends = np.append(starts[1:], starts[-1:])
        rows = Rows(data, starts, self.ends, keys)
        rows.read()
        self.columns, self.was_read, self.is_gone = rows.columns, rows.was_read, rows.is_gone
        self.gap_starts, self.gap_ends = rows.gap_starts, rows.gap_ends
        self.layouts, self.layout_of = rows.layouts, rows.layout_of
        self.copies, self.originals = rows.copies, rows.originals

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
