"""Learn the byte layout of one pickled event, so that all events with this layout can be read as table rows."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

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
