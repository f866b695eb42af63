"""Read a trace event by event, so that a file of any length takes the memory of one piece of it."""

import json
import re
from collections.abc import Iterator
from typing import Any

from ligerprof.errors import TraceFormatError
from ligerprof.units import MIB, format_bytes

_EVENTS_KEY = "traceEvents"
_LARGEST_VALUE_CHARACTERS = 16 * MIB
_WHITESPACE = re.compile(r"[ \t\n\r]*")
# what the end of a file may leave of a number behind the part that is one already
_REST_OF_NUMBER = re.compile(r"\.|[eE][+-]?")
# what may still change at the end of a chunk: `1.5e` of `1.5e-07`, `-Infi`, half an escaped surrogate pair
_LOOK_AHEAD = 16
_WRITE_ONE = "Write one with torch.profiler's export_chrome_trace() or `ligerprof step`."


def trace_events(source: str, chunks: Iterator[str]) -> Iterator[Any]:
    """Every entry of `traceEvents`, or of a file that is one list, in its order and of any type.

    Args:
        source: what messages call the file.
        chunks: its text.

    Raises:
        TraceFormatError: no JSON, cut short, without events, or nested deeper than any trace.
    """
    scanner = _Scanner(source, chunks)
    first = scanner.next_character()
    if first == "[":
        yield from scanner.items()
    elif first == "{":
        yield from _events_of_object(scanner)
    else:
        raise TraceFormatError(f"{source}: no trace: it begins with {first!r}. {_WRITE_ONE}")


def _events_of_object(scanner: "_Scanner") -> Iterator[Any]:
    found = False
    for key in scanner.members():
        if key == _EVENTS_KEY:
            scanner.require("[")
            found = True
            yield from scanner.items()
        else:
            scanner.value()
    if not found:
        raise TraceFormatError(f"{scanner.source}: no {_EVENTS_KEY!r} in it. {_WRITE_ONE}")


class _Scanner:
    """JSON values out of a stream of text; holds one chunk and what began before it."""

    def __init__(self, source: str, chunks: Iterator[str]) -> None:
        self.source = source
        self._chunks = chunks
        self._text = ""
        self._at = 0
        # characters before the text that is held
        self._before = 0
        self._ended = False
        # names from the wild hold control characters
        self._decode = json.JSONDecoder(strict=False).raw_decode

    def next_character(self) -> str:
        """Step over whitespace and take the character behind it."""
        character = self._peek()
        self._at += 1
        return character

    def require(self, wanted: str) -> None:
        """Take one character, which must be `wanted`."""
        if (found := self.next_character()) != wanted:
            raise self._wrong(f"{found!r} where {wanted!r} belongs")

    def members(self) -> Iterator[str]:
        """The keys of an object whose brace is taken; whoever asks takes each value before the next key."""
        if self._take_if_next("}"):
            return
        while True:
            key = self.value()
            if not isinstance(key, str):
                raise self._wrong("a key that is no text")
            self.require(":")
            yield key
            if self._ends("}"):
                return

    def items(self) -> Iterator[Any]:
        """The values of a list whose bracket is taken."""
        if self._take_if_next("]"):
            return
        while True:
            yield self.value()
            if self._ends("]"):
                return

    def value(self) -> Any:
        """Take one whole value."""
        self._peek()
        while True:
            try:
                value, end = self._decode(self._text, self._at)
            except RecursionError:
                raise self._wrong("values nested deeper than in any trace") from None
            except json.JSONDecodeError as error:
                self._read_on_or_raise(error)
                continue
            if end + _LOOK_AHEAD <= len(self._text) or not self._read_on():
                if type(value) in (int, float) and _REST_OF_NUMBER.fullmatch(self._text, end):
                    raise self._cut_short()
                self._at = end
                return value

    def _ends(self, closing: str) -> bool:
        character = self.next_character()
        if character not in {",", closing}:
            raise self._wrong(f"{character!r} where ',' or {closing!r} belongs")
        return character == closing

    def _take_if_next(self, wanted: str) -> bool:
        found = self._peek() == wanted
        self._at += found
        return found

    def _peek(self) -> str:
        """Step over whitespace and look at the character behind it."""
        while True:
            self._at = _WHITESPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read_on():
                raise self._cut_short()

    def _read_on(self) -> bool:
        """Add a chunk to what is not taken yet; False at the end of the file."""
        if self._ended:
            return False
        held = self._text[self._at :]
        if len(held) > _LARGEST_VALUE_CHARACTERS:
            raise self._wrong(f"no whole value within {format_bytes(_LARGEST_VALUE_CHARACTERS)}")
        chunk = next(self._chunks, None)
        if chunk is None:
            self._ended = True
            return False
        self._before += self._at
        self._text, self._at = held + chunk, 0
        return True

    def _read_on_or_raise(self, error: json.JSONDecodeError) -> None:
        """After a value that could not be decoded: read on if its end may not have been read yet."""
        at_the_end = error.pos + _LOOK_AHEAD >= len(self._text) or error.msg.startswith("Unterminated string")
        if at_the_end and self._read_on():
            return
        if at_the_end:
            raise self._cut_short()
        self._at = error.pos
        raise self._wrong(error.msg[:80])

    def _cut_short(self) -> TraceFormatError:
        return TraceFormatError(
            f"{self.source}: ends within a value, after {self._before + len(self._text):,} characters."
            " Was the file cut short?"
        )

    def _wrong(self, what: str) -> TraceFormatError:
        return TraceFormatError(
            f"{self.source}: not valid JSON at character {self._before + self._at:,}: {what}. {_WRITE_ONE}"
        )
