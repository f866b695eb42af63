"""Load a snapshot's pickle: its events as tables if their bytes allow it, else as any pickle of plain data."""

import io
import pickle
import pickletools
import re
from collections.abc import Callable, Sequence
from itertools import chain, compress, pairwise, repeat
from struct import unpack_from
from sys import getrefcount
from typing import Any, NoReturn

import numpy as np

from ligerprof.errors import SnapshotFormatError
from ligerprof.snapshots.collector import collector_paused
from ligerprof.snapshots.event_tables import Cut, cut_alike
from ligerprof.snapshots.trace import Bytes, DeviceTrace, EventTable, Flags
from ligerprof.snapshots.watch import Allowance, LimitError
from ligerprof.text import printable

_HARMFUL = "It can run code, which no memory snapshot needs: do not load this file with other tools."
_UNKNOWN = "torch writes dicts, lists, text, 64-bit integers and pairs of small ones: dump the snapshot again."

# What torch's C++ pickler and Python's (protocols 2 to 5) write for dicts, lists, text, numbers
# and pairs of integers. All other opcodes are refused: those that import, call or build; tuples
# other than pairs of integers (nested tuples take exponential time to hash); those that declare
# lengths which plain data does not need. Any of these values can be a dict's key, and a file that
# knows many keys with the same hash makes a dict quadratic: so integers have 64 bits, and those
# of pairs 32. LONG1 of nine bytes is an unsigned integer: torch writes an unknown line, -1, so.
_SMALL_INTEGER = rb"(?:K.|M..|J....)"
_INTEGER = (
    rb"(?:K.|M..|J....|\x8a(?:\x00|\x01.|\x02..|\x03...|\x04.{4}|\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}|\x09.{8}\x00))"
)
# most texts are short; the lengths of the others are checked one by one
_TEXT = rb"\x8c(?:" + b"|".join(re.escape(bytes([length])) + b".{%d}" % length for length in range(1, 64)) + rb")"
_PAIR = _SMALL_INTEGER * 2 + rb"\x86"
# what remains of events that were read from their bytes: a memoized number, and lookups that are dropped at once
_ANY = rb"M\xff\xff\x94|j....0?|h.0?|\x94|[()}\]ueas\x88\x89N]|" + _PAIR + rb"|" + _INTEGER + rb"|q.|G.{8}|" + _TEXT
# bounded, because re keeps memory for each repetition of an unbounded one
_RUN = re.compile(rb"(?s)(?:" + _ANY + rb"){1,4096}")
_BINUNICODE, _SHORT_BINUNICODE, _LONG_BINPUT = 0x58, 0x8C, 0x72
_PROTO, FRAME, _STOP = 0x80, 0x95, 0x2E
PROTO_BYTES, FRAME_HEAD_BYTES = 2, 9
_NEWEST_PROTOCOL = 5
_CHECKED_BYTES = 2**18
# Python's frames have 64 KiB and at most one more value
_LONGEST_FRAME_BYTES = 2**20
_CALLS = ("GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX")
_HARMFUL_NAMES = frozenset((*_CALLS, "EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID"))
_NAMES = {ord(each.code): each.name for each in pickletools.opcodes}


def require_plain_data(pickled: memoryview, allowance: Allowance) -> None:
    """Walk every opcode up to STOP without loading anything.

    Raises:
        SnapshotFormatError: an opcode that plain data does not need, a length beyond the end of
            the data, a memo index that no earlier opcode can have filled, no STOP, or no time left.
    """
    position, end, checked = 0, len(pickled), 0
    while position < end:
        if position > checked + _CHECKED_BYTES:
            allowance.check()
            checked = position
        run = _RUN.match(pickled, position)
        if run is not None:
            position = run.end()
        elif pickled[position] == _STOP:
            return
        else:
            position = _STEPS.get(pickled[position], _refuse)(pickled, position)
    raise SnapshotFormatError(f"the pickle ends at byte {end} before it is complete. Was the file cut short?")


def _refuse(pickled: memoryview, position: int) -> int:
    name = _NAMES.get(pickled[position], f"0x{pickled[position]:02x}")
    if name in _HARMFUL_NAMES:
        raise SnapshotFormatError(f"refusing pickle opcode {name} at byte {position}. {_HARMFUL}")
    raise SnapshotFormatError(f"pickle opcode {name} at byte {position} is not supported. {_UNKNOWN}")


def _argument(pickled: memoryview, position: int, layout: str, size: int) -> int:
    if position + 1 + size > len(pickled):
        raise SnapshotFormatError(f"the pickle ends inside the opcode at byte {position}. Was the file cut short?")
    return unpack_from(layout, pickled, position + 1)[0]


def _skip_text(layout: str, size: int) -> Callable[[memoryview, int], int]:
    def skip(pickled: memoryview, position: int) -> int:
        length = _argument(pickled, position, layout, size)
        after = position + 1 + size + length
        if after > len(pickled):
            raise SnapshotFormatError(
                f"text of {length} bytes declared at byte {position} of {len(pickled)}. Was the file cut short?"
            )
        return after

    return skip


def _skip_protocol(pickled: memoryview, position: int) -> int:
    version = _argument(pickled, position, "<B", 1)
    if version > _NEWEST_PROTOCOL:
        raise SnapshotFormatError(
            f"pickle protocol {version} at byte {position} is unknown. Known: 2 to {_NEWEST_PROTOCOL}."
        )
    return position + 2


def _skip_frame(pickled: memoryview, position: int) -> int:
    length = _argument(pickled, position, "<Q", 8)
    if position + FRAME_HEAD_BYTES + length > len(pickled):
        raise SnapshotFormatError(
            f"a frame of {length} bytes declared at byte {position} of {len(pickled)}. Was the file cut short?"
        )
    is_whole = position == PROTO_BYTES and position + FRAME_HEAD_BYTES + length == len(pickled)
    if length > _LONGEST_FRAME_BYTES and not is_whole:
        raise SnapshotFormatError(f"a frame of {length} bytes at byte {position} is not supported. {_UNKNOWN}")
    return position + FRAME_HEAD_BYTES


def _skip_memo_put(pickled: memoryview, position: int) -> int:
    index = _argument(pickled, position, "<I", 4)
    # each object takes at least a byte, so a valid index is smaller than its position
    if index > position:
        raise SnapshotFormatError(f"memo index {index} at byte {position} is larger than the number of objects so far.")
    return position + 5


_STEPS: dict[int, Callable[[memoryview, int], int]] = {
    _BINUNICODE: _skip_text("<I", 4),
    _SHORT_BINUNICODE: _skip_text("<B", 1),
    _LONG_BINPUT: _skip_memo_put,
    _PROTO: _skip_protocol,
    FRAME: _skip_frame,
}


HOW_TO_RECORD = "Write one with torch.cuda.memory._dump_snapshot() or `ligerprof step`."
PICKLE_START = b"\x80"
# the reader checks its allowance after as many bytes
_BYTES_AT_ONCE = 2**16


def load_plain_data(pickled: Bytes, allowance: Allowance, *, extra: bytes = b"") -> Any:
    """Load a pickle of dicts, lists, text and numbers.

    Args:
        pickled: overwritten.
        allowance: limits on time and memory.
        extra: our own opcodes, inserted before STOP.

    Raises:
        SnapshotFormatError: it holds anything else, is damaged, or exceeds the allowance.
    """
    if pickled[:1].tobytes() != PICKLE_START:
        raise SnapshotFormatError(f"not a pickle: it starts with {pickled[:8].tobytes()!r}. {HOW_TO_RECORD}")
    require_plain_data(pickled.data, allowance)
    body = without_frames(pickled)
    content = pickled if body is None else body
    if extra:
        content = np.append(content[: -len(pickle.STOP)], np.frombuffer(extra + pickle.STOP, dtype=np.uint8))
    with collector_paused():
        try:
            # the unpickler reads older protocols byte by byte unless the file can peek
            return _PlainUnpickler(io.BufferedReader(_Watched(content.data, allowance), _BYTES_AT_ONCE)).load()
        except SnapshotFormatError:
            raise
        # a damaged pickle can raise nearly any exception; none of them is our bug
        except Exception as error:
            raise SnapshotFormatError(
                f"damaged pickle: {type(error).__name__}: {printable(str(error))[:120]}."
            ) from None


def without_frames(pickled: Bytes) -> Bytes | None:
    """Remove the frame opcodes, which only announce lengths; None if there is anything else between two frames.

    The unpickler reads a frame at once, so that nothing can be checked meanwhile.

    Args:
        pickled: overwritten.
    """
    bounds = []
    position = PROTO_BYTES
    while position + FRAME_HEAD_BYTES < len(pickled) and pickled[position] == FRAME:
        start = position + FRAME_HEAD_BYTES
        position = start + int.from_bytes(pickled[position + 1 : start].tobytes(), "little")
        bounds.append((start, position))
    if not bounds:
        return pickled
    if position != len(pickled):
        return None
    end = PROTO_BYTES
    for start, stop in bounds:
        pickled[end : end + stop - start] = pickled[start:stop]
        end += stop - start
    return pickled[:end]


class _Watched(io.RawIOBase):
    """Memory as a file, which checks the allowance at every read."""

    def __init__(self, content: memoryview, allowance: Allowance) -> None:
        self._content, self._allowance = content, allowance

    def readable(self) -> bool:
        """Whether it can be read, which it can."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer; 0 at the end."""
        self._allowance.check()
        count = min(len(buffer), len(self._content))
        buffer[:count], self._content = self._content[:count], self._content[count:]
        return count


class _PlainUnpickler(pickle.Unpickler):
    """The last line of defense: the opcode walk has already refused every global."""

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        name = printable(f"{module_name}.{global_name}")
        raise SnapshotFormatError(f"refusing to import {name} from a snapshot.")


_TRACES = "device_traces"
# the items of a list of events after the cut: a number for each event that was read, whole events, and kept values
_MARK, _EVENT, _LIST, _OTHER = range(4)
_KIND_OF = {int: _MARK, dict: _EVENT, list: _LIST}
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
    del content, body
    return None if cut is None else _joined(cut, allowance)


def _joined(cut: Cut, allowance: Allowance) -> Any:
    """Load the rest of the pickle and insert the tables; None if the two do not match."""
    loaded = _load(cut, allowance)
    if loaded is None:
        return None
    values, keys, objects = loaded
    traces: Any = values.get(_TRACES)
    has_lists = isinstance(traces, list) and {list}.issuperset(map(type, traces))
    if "action" not in keys or not {str}.issuperset(map(type, keys)) or not has_lists:
        return None
    items = list(chain.from_iterable(traces))
    bounds = np.cumsum([0, *map(len, traces)]).tolist()
    for trace in traces:
        trace.clear()
    kinds = np.fromiter(map(_KIND_OF.get, map(type, items), repeat(_OTHER)), np.int8, len(items))
    marks, kept, dicts = (
        list(compress(items, chosen.tolist())) for chosen in (kinds == _MARK, kinds >= _LIST, kinds == _EVENT)
    )
    # something else refers to an event that was cut out
    is_missed = max(map(getrefcount, marks), default=0) > _COUNT_IN_TWO_LISTS
    if len(marks) != len(cut.places) or len(kept) != cut.kept or is_missed:
        return None
    if not _fill_copies(cut, kept, (kinds[kinds >= _LIST] == _LIST)):
        return None
    table = EventTable(columns=dict(zip(keys, cut.columns, strict=True)), objects=objects + kept)
    rows = np.where(kinds == _MARK, cut.places[np.cumsum(kinds == _MARK) - 1], -np.cumsum(kinds == _EVENT))
    # kept values are not events
    pieces = (slice(start, end) for start, end in pairwise(bounds))
    values[_TRACES] = [DeviceTrace(dicts, table, rows[piece][kinds[piece] < _LIST]) for piece in pieces]
    return values


def _load(cut: Cut, allowance: Allowance) -> tuple[dict[Any, Any], list[Any], list[Any]] | None:
    """The rest of the pickle, the table's keys, and the objects its cells refer to; None if it is not a snapshot."""
    lookups = (b"j" + index.to_bytes(4, "little") for index in np.append(cut.keys, cut.references).tolist())
    rest = np.frombuffer(bytearray(cut.rest), dtype=np.uint8)
    try:
        # append a list of memo entries to the snapshot and pair the two
        loaded = load_plain_data(rest, allowance, extra=b"](" + b"".join(lookups) + b"e\x86")
    except LimitError:
        raise
    except SnapshotFormatError:
        return None
    # a crafted file may stop before our opcodes
    if not isinstance(loaded, tuple) or len(loaded) != 2 or not isinstance(loaded[0], dict):
        return None
    values, known = loaded
    return values, known[: len(cut.keys)], known[len(cut.keys) :]


def _fill_copies(cut: Cut, kept: Sequence[Any], are_lists: Flags) -> bool:
    """Make the table share equal lists, and fill those that were cut empty; False if any is not a list.

    Most of them are then not needed: only those that something else in the file refers to are filled.
    """
    column = cut.columns[-1]
    copies, originals = (-1 - column[places] - len(cut.references) for places in (cut.copies, cut.originals))
    if not are_lists[copies].all() or not are_lists[originals].all():
        return False
    # the list of all items and `kept` hold each list
    counts = map(getrefcount, map(kept.__getitem__, copies.tolist()))
    for place in [place for place, count in enumerate(counts) if count > _COUNT_IN_TWO_LISTS]:
        kept[copies[place]].extend(kept[originals[place]])
    column[cut.copies] = column[cut.originals]
    return True
