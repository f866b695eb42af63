"""Read a trace event by event into columns: about 60 bytes per event, within limits that real traces do not reach."""

import codecs
import json
import math
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from ligerprof.errors import TraceFormatError
from ligerprof.files import UnpackError, opened, unpacked
from ligerprof.text import printable
from ligerprof.units import GIB, MIB, format_bytes

RECORD_LESS = "Record fewer steps, with schedule(active=1)."
_CHUNK_BYTES = MIB
_LARGEST_TEXT_BYTES = 4 * GIB
# traces compress 15 to 30 times, repetitive ones a few hundred times with xz
_LARGEST_EXPANSION = 500
_ALWAYS_ALLOWED_BYTES = 64 * MIB


def text_chunks(path: Path) -> Iterator[str]:
    """Yield the text of a trace, plain or compressed; the first bytes distinguish gzip and xz.

    Invalid UTF-8, which kernel names can contain, becomes replacement characters.

    Raises:
        TraceFormatError: the file is unreadable, damaged, truncated or too large.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
    try:
        yield from map(decoder.decode, _bounded(path))
    except UnpackError as error:
        raise TraceFormatError(f"{path}: {error}") from None
    except (OSError, ValueError) as error:
        raise TraceFormatError(f"{path}: cannot be read ({printable(str(error))[:120]}).") from None
    yield decoder.decode(b"", final=True)


def _bounded(path: Path) -> Iterator[bytes]:
    with opened(path) as file:
        chunks = unpacked(file, _allowed_bytes, RECORD_LESS)
        if chunks is not None:
            yield from chunks
            return
        seen_bytes = 0
        for chunk in iter(partial(file.read, _CHUNK_BYTES), b""):
            seen_bytes += len(chunk)
            if seen_bytes > _LARGEST_TEXT_BYTES:
                raise TraceFormatError(f"{path}: more than {format_bytes(_LARGEST_TEXT_BYTES)} of text. {RECORD_LESS}")
            yield chunk


def _allowed_bytes(packed_bytes: int) -> int:
    return min(_LARGEST_TEXT_BYTES, max(_ALWAYS_ALLOWED_BYTES, packed_bytes * _LARGEST_EXPANSION))


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
        if self._skip_whitespace():
            raise self._invalid(f"{self._text[self._at]!r} after the end")

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
        if not self._skip_whitespace():
            raise self._truncated()
        return self._text[self._at]

    def _skip_whitespace(self) -> bool:
        """Skip whitespace; False at the end of the file."""
        while True:
            self._at = _WHITESPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text):
                return True
            if not self._read_on():
                return False

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


Times = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

ABSENT = -1
PLAIN, RECORDED, NODE = 0, 1, 2
COPY, KERNEL = 0, 1
_MOST_ROWS = 10_000_000
_MOST_UNUSABLE = 1_000_000
_MOST_NAMES = 100_000
_LONGEST_NAME = 1000
# devices beyond this count as one
_MOST_DEVICES = 256
_LARGEST_NUMBER = 2**62


class Table(Enum):
    """The kind of an event that is kept."""

    GPU_WORK = 0
    CALL = 1
    OPERATOR = 2
    ANNOTATION = 3


# categories that Kineto writes now, and those before torch 1.12; gpu_user_annotation is left out because
# it repeats a CPU annotation over the time that its kernels took
_TABLES: dict[str, Table] = {
    "kernel": Table.GPU_WORK,
    "gpu_memcpy": Table.GPU_WORK,
    "gpu_memset": Table.GPU_WORK,
    "memcpy": Table.GPU_WORK,
    "memset": Table.GPU_WORK,
    "cuda_runtime": Table.CALL,
    "cuda_driver": Table.CALL,
    "runtime": Table.CALL,
    "cpu_op": Table.OPERATOR,
    "operator": Table.OPERATOR,
    "user_annotation": Table.ANNOTATION,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Events:
    """The events of one kind, one column per field; times in microseconds of the trace's clock.

    Attributes:
        names: index into `Trace.names`.
        places: for GPU work, the device; otherwise the host thread, as an index into `Trace.threads`.
        streams: for GPU work, the stream; otherwise 0.
        kinds: for GPU work, KERNEL, or COPY for copies and fills; for an operator, RECORDED if it
            recorded an autograd node, NODE if it is one; otherwise PLAIN.
        correlations: id shared by a call and the work it launched, or ABSENT.
        operators: id of the event's own or enclosing operator, or ABSENT.
    """

    starts: Times
    ends: Times
    names: Numbers
    places: Numbers
    streams: Numbers
    correlations: Numbers
    operators: Numbers
    kinds: Numbers

    def __len__(self) -> int:
        return len(self.starts)

    def where(self, chosen: npt.NDArray[Any]) -> "Events":
        """Select events by a mask or an index."""
        return Events(**{name: getattr(self, name)[chosen] for name in Events.__slots__})


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """The parts of a profiler trace that the analysis uses.

    Attributes:
        threads: (process, thread) of each host thread.
        unusable: number of entries skipped for lack of a usable time or name.
    """

    source: str
    work: Events
    calls: Events
    operators: Events
    annotations: Events
    names: tuple[str, ...]
    threads: tuple[tuple[Any, Any], ...]
    unusable: int

    def named(self, events: Events, pattern: re.Pattern[str]) -> Mask:
        """Mask of the events whose name matches a pattern."""
        matching: Mask = np.array([pattern.search(name) is not None for name in self.names], dtype=np.bool_)
        return matching[events.names]


def read_trace(path: str | Path) -> Trace:
    """Read a Chrome trace written by torch.profiler, plain or compressed with gzip or xz.

    Raises:
        TraceFormatError: the file is not a trace, is damaged, truncated or too large, or has no GPU work.
    """
    file = Path(path)
    return collect(str(file), trace_events(str(file), text_chunks(file)))


def collect(source: str, entries: Iterable[Any]) -> Trace:
    """Collect the entries of `traceEvents` into columns.

    Raises:
        TraceFormatError: there are too many events, or none is GPU work.
    """
    collector = _Collector(source)
    for entry in entries:
        collector.add(entry)
    if not collector.rows[Table.GPU_WORK][0]:
        raise TraceFormatError(f"{source}: contains no GPU work. Was ProfilerActivity.CUDA among its activities?")
    return collector.trace()


class _Collector:
    def __init__(self, source: str) -> None:
        # in the order of the fields of Events
        self.rows: dict[Table, list[array[Any]]] = {
            table: [array("d" if name in ("starts", "ends") else "q") for name in Events.__slots__] for table in Table
        }
        self._source = source
        self._names: dict[str, int] = {}
        self._threads: dict[tuple[Any, Any], int] = {}
        self._count = 0
        self._unusable = 0

    def add(self, entry: Any) -> None:
        """Keep an entry if it is a time span that the analysis uses."""
        if not isinstance(entry, dict) or "ph" not in entry:
            self._skip()
            return
        category = entry.get("cat")
        if entry["ph"] != "X" or not isinstance(category, str):
            return
        table = _TABLES.get(category) or _TABLES.get(category.lower())
        if table is None:
            return
        start, duration, name = entry.get("ts"), entry.get("dur"), entry.get("name")
        if not (_is_time(start) and _is_time(duration) and duration >= 0 and isinstance(name, str)):
            self._skip()
            return
        self._count += 1
        if self._count > _MOST_ROWS:
            raise TraceFormatError(f"{self._source}: more than {_MOST_ROWS:,} events. {RECORD_LESS}")
        values = (start, start + duration, self._name_id(name), *self._details(table, entry))
        for column, value in zip(self.rows[table], values, strict=True):
            column.append(value)

    def _skip(self) -> None:
        self._unusable += 1
        if self._unusable > _MOST_UNUSABLE:
            raise TraceFormatError(f"{self._source}: more than {_MOST_UNUSABLE:,} entries are not trace events.")

    def _details(self, table: Table, entry: Mapping[str, Any]) -> tuple[int, int, int, int, int]:
        """Place, stream, correlation, operator and kind."""
        args = entry["args"] if isinstance(entry.get("args"), dict) else {}
        stream, kind = 0, PLAIN
        if table is Table.GPU_WORK:
            place = min(_number(args.get("device", entry.get("pid")), 0), _MOST_DEVICES)
            stream = _number(args.get("stream", entry.get("tid")), 0)
            kind = KERNEL if entry["cat"].lower() == "kernel" else COPY
        else:
            place = self._thread_id(entry.get("pid"), entry.get("tid"))
            kind = _autograd_kind(args) if table is Table.OPERATOR else PLAIN
        correlation = _number(args.get("correlation"), ABSENT)
        operator = _number(args.get("External id", args.get("external id")), ABSENT)
        return place, stream, correlation, operator, kind

    def trace(self) -> Trace:
        """The trace collected so far."""
        events = {
            table: Events(**dict(zip(Events.__slots__, map(np.array, columns), strict=True)))
            for table, columns in self.rows.items()
        }
        return Trace(
            source=self._source,
            work=events[Table.GPU_WORK],
            calls=events[Table.CALL],
            operators=events[Table.OPERATOR],
            annotations=events[Table.ANNOTATION],
            names=tuple(self._names),
            threads=tuple(self._threads),
            unusable=self._unusable,
        )

    def _name_id(self, name: str) -> int:
        known = self._names.get(name)
        if known is not None:
            return known
        # control characters and lone surrogates become `?`
        readable = "".join(character if character.isprintable() else "?" for character in name[:_LONGEST_NAME])
        if len(self._names) >= _MOST_NAMES:
            readable = "(more names)"
        return self._names.setdefault(readable, len(self._names))

    def _thread_id(self, process: Any, thread: Any) -> int:
        key = tuple(value if isinstance(value, (int, str)) else None for value in (process, thread))
        if len(self._threads) >= _MOST_NAMES:
            key = (None, None)
        return self._threads.setdefault(key, len(self._threads))  # type: ignore[arg-type]


def _is_time(value: Any) -> TypeGuard[float]:
    if type(value) is float:
        return math.isfinite(value) and abs(value) < _LARGEST_NUMBER
    return type(value) is int and -_LARGEST_NUMBER < value < _LARGEST_NUMBER


def _number(value: Any, default: int) -> int:
    """The value if it is an integer that a column can hold, else the default."""
    return value if type(value) is int and 0 <= value < _LARGEST_NUMBER else default


def first_match(ids: Numbers, wanted: Numbers) -> Numbers:
    """For each wanted id, the index of the first equal id; ABSENT if there is none or the id is ABSENT."""
    known = np.flatnonzero(ids != ABSENT)
    if not len(known):
        return np.full(len(wanted), ABSENT)
    known = known[np.argsort(ids[known], kind="stable")]
    places = np.minimum(np.searchsorted(ids[known], wanted), len(known) - 1)
    found = (ids[known[places]] == wanted) & (wanted != ABSENT)
    return np.where(found, known[places], ABSENT)


def _autograd_kind(args: Mapping[str, Any]) -> int:
    """RECORDED, NODE or PLAIN. A forward operator and its autograd node share a sequence number.

    A node's `Fwd thread id` is the forward thread, from 1; for a forward operator it is 0 or missing.
    """
    if _number(args.get("Sequence number"), ABSENT) == ABSENT:
        return PLAIN
    return NODE if _number(args.get("Fwd thread id"), 0) else RECORDED
