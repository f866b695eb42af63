"""Read the dicts of a pickle that share a layout as columns, from their bytes."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ligerprof.snapshots.pickles.layout import WORD_BYTES, Layout, ValueKind, read_layout
from ligerprof.snapshots.pickles.lists import equal_lists
from ligerprof.snapshots.trace import Bytes, Column, Int64s

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
        columns: overwritten, or replaced by wider ones.
    """

    def __init__(
        self, data: Bytes, starts: Int64s, ends: Int64s, keys: tuple[int, ...], columns: Sequence[Column]
    ) -> None:
        self.data, self.starts, self.ends, self.keys = data, starts, ends, keys
        # narrow until a value needs more: new memory takes longer to get than to fill
        self.columns = list(columns)
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
