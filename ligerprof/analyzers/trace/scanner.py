"""Parse a trace event by event, so that memory use does not grow with the length of the file."""

import json
import re
from collections.abc import Iterator
from typing import Any

from ligerprof.errors import TraceFormatError
from ligerprof.units import MIB, format_bytes

_EVENTS_KEY = "traceEvents"
_LARGEST_VALUE_CHARACTERS = 16 * MIB
_WHITESPACE = re.compile(r"[ \t\n\r]*")
# what may follow a complete number if the file is truncated within a longer one
_NUMBER_TAIL = re.compile(r"\.|[eE][+-]?")
# a token at the end of a chunk may be incomplete: `1.5e` of `1.5e-07`, `-Infi`, half an escaped surrogate pair
_LOOK_AHEAD = 16
_WRITE_ONE = "Write one with torch.profiler's export_chrome_trace() or `ligerprof step`."


def trace_events(source: str, chunks: Iterator[str]) -> Iterator[Any]:
    """Yield every entry of `traceEvents`, or of a file that is one list, in order and unchecked.

    Args:
        source: the file's name in messages.
        chunks: the file's text.

    Raises:
        TraceFormatError: the text is not JSON, is truncated or too deeply nested, or has no events.
    """
    scanner = _Scanner(source, chunks)
    first = scanner.next_character()
    if first == "[":
        yield from scanner.items()
    elif first == "{":
        yield from _events_of_object(scanner)
    else:
        raise TraceFormatError(f"{source}: not a trace: it begins with {first!r}. {_WRITE_ONE}")
    scanner.require_end()


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
        raise TraceFormatError(f"{scanner.source}: no {_EVENTS_KEY!r} key. {_WRITE_ONE}")


class _Scanner:
    """Decode JSON values from a stream of text; holds one chunk plus any value that began before it."""

    def __init__(self, source: str, chunks: Iterator[str]) -> None:
        self.source = source
        self._chunks = chunks
        self._text = ""
        self._at = 0
        # characters before the text in memory
        self._before = 0
        self._ended = False
        # not strict: some kernel names contain control characters
        self._decode = json.JSONDecoder(strict=False).raw_decode

    def next_character(self) -> str:
        """Skip whitespace and consume the next character."""
        character = self._peek()
        self._at += 1
        return character

    def require(self, wanted: str) -> None:
        """Consume one character, which must be `wanted`."""
        if (found := self.next_character()) != wanted:
            raise self._invalid(f"expected {wanted!r}, found {found!r}")

    def require_end(self) -> None:
        """Raise if anything but white space is left."""
        while True:
            self._at = _WHITESPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text):
                raise self._invalid(f"{self._text[self._at]!r} after the end")
            if not self._read_on():
                return

    def members(self) -> Iterator[str]:
        """Yield the keys after an object's opening brace; the caller consumes each value before the next key."""
        if self._take_if_next("}"):
            return
        while True:
            key = self.value()
            if not isinstance(key, str):
                raise self._invalid("a key is not a string")
            self.require(":")
            yield key
            if self._ends("}"):
                return

    def items(self) -> Iterator[Any]:
        """Yield the values after a list's opening bracket."""
        if self._take_if_next("]"):
            return
        while True:
            yield self.value()
            if self._ends("]"):
                return

    def value(self) -> Any:
        """Consume one complete value."""
        self._peek()
        while True:
            try:
                value, end = self._decode(self._text, self._at)
            except RecursionError:
                raise self._invalid("values are nested too deeply") from None
            except json.JSONDecodeError as error:
                self._read_on_or_raise(error)
                continue
            except ValueError:
                raise self._invalid("an integer has thousands of digits") from None
            if end + _LOOK_AHEAD <= len(self._text) or not self._read_on():
                if type(value) in (int, float) and _NUMBER_TAIL.fullmatch(self._text, end):
                    raise self._truncated()
                self._at = end
                return value

    def _ends(self, closing: str) -> bool:
        character = self.next_character()
        if character not in {",", closing}:
            raise self._invalid(f"expected ',' or {closing!r}, found {character!r}")
        return character == closing

    def _take_if_next(self, wanted: str) -> bool:
        found = self._peek() == wanted
        self._at += found
        return found

    def _peek(self) -> str:
        """Skip whitespace and return the next character without consuming it."""
        while True:
            self._at = _WHITESPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read_on():
                raise self._truncated()

    def _read_on(self) -> bool:
        """Append a chunk to the unconsumed text; False at the end of the file."""
        if self._ended:
            return False
        held = self._text[self._at :]
        if len(held) > _LARGEST_VALUE_CHARACTERS:
            raise self._invalid(f"a value is longer than {format_bytes(_LARGEST_VALUE_CHARACTERS)}")
        # as much as is held, so that a long value is decoded anew only when it has doubled
        pieces, length = [held], 0
        while length <= len(held) and (chunk := next(self._chunks, None)) is not None:
            pieces.append(chunk)
            length += len(chunk)
        if not length:
            self._ended = True
            return False
        self._before += self._at
        self._text, self._at = "".join(pieces), 0
        return True

    def _read_on_or_raise(self, error: json.JSONDecodeError) -> None:
        """Read another chunk if the undecodable value may be incomplete; otherwise raise."""
        at_the_end = error.pos + _LOOK_AHEAD >= len(self._text) or error.msg.startswith("Unterminated string")
        if at_the_end and self._read_on():
            return
        if at_the_end:
            raise self._truncated()
        self._at = error.pos
        raise self._invalid(error.msg[:80])

    def _truncated(self) -> TraceFormatError:
        return TraceFormatError(
            f"{self.source}: ends within a value, after {self._before + len(self._text):,} characters."
            " Was the file truncated?"
        )

    def _invalid(self, problem: str) -> TraceFormatError:
        return TraceFormatError(
            f"{self.source}: not valid JSON at character {self._before + self._at:,}: {problem}. {_WRITE_ONE}"
        )
