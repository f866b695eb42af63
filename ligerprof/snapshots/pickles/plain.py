"""Load a pickle of plain data: its opcodes are walked first, no global is resolved, and nothing is called or built."""

import io
import pickle
import re
import sys
from collections.abc import Callable, Sequence
from struct import unpack_from
from typing import Any, NoReturn

from ligerprof.errors import SnapshotFormatError
from ligerprof.snapshots.collector import collector_paused
from ligerprof.snapshots.trace import Bytes
from ligerprof.snapshots.watch import Allowance
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
_REFERENCE = rb"(?:j....|h.)"
# the start of the dict of a block or an event, four or eight keys at once; a snapshot can have a million in a row
_VALUE = rb"(?:j....|h.|\x8a\x07.{7}|\x8a\x06.{6}|K.|J....|M..)"
_FOUR_KEYS = (_REFERENCE + _VALUE) * 4
# the last value is neither a lookup that is dropped at once, which ends in 0 (see below), nor a pair's first integer
_DICT = rb"\}\x94\(" + _FOUR_KEYS + rb"(?:" + _FOUR_KEYS + rb")?(?![0KMJ])"
# most texts are short; the lengths of the others are checked one by one
_TEXT = rb"\x8c(?:" + b"|".join(re.escape(bytes([length])) + b".{%d}" % length for length in range(1, 64)) + rb")"
_PAIR = _SMALL_INTEGER * 2 + rb"\x86"
# what remains of events that were read from their bytes: a memoized number, and lookups that are dropped at once
_ANY = rb"j....0?|h.0?|\x94+|[()}\]ueas\x88\x89N]|M\xff\xff\x94+|" + _PAIR + rb"|" + _INTEGER + rb"|q.|G.{8}|" + _TEXT
# bounded, because re keeps memory for each repetition of an unbounded one. A possessive one takes half the time:
# nothing follows it, so re need not be able to undo a part. Before Python 3.11.5, it may match too much (gh-106052)
_REPEATED = rb"{1,4096}" + (b"+" if sys.version_info >= (3, 11, 5) else b"")
_RUN = re.compile(rb"(?s)(?:" + _DICT + rb"|" + _ANY + rb")" + _REPEATED)
_BINUNICODE, _SHORT_BINUNICODE, _LONG_BINPUT = 0x58, 0x8C, 0x72
_PROTO, FRAME, _STOP = 0x80, 0x95, 0x2E
PROTO_BYTES, FRAME_HEAD_BYTES = 2, 9
_NEWEST_PROTOCOL = 5
_CHECKED_BYTES = 2**18
# Python's frames have 64 KiB and at most one more value
_LONGEST_FRAME_BYTES = 2**20
_HARMFUL_NAMES = {
    ord("c"): "GLOBAL",
    0x93: "STACK_GLOBAL",
    ord("R"): "REDUCE",
    ord("b"): "BUILD",
    ord("i"): "INST",
    ord("o"): "OBJ",
    0x81: "NEWOBJ",
    0x92: "NEWOBJ_EX",
    0x82: "EXT1",
    0x83: "EXT2",
    0x84: "EXT4",
    ord("P"): "PERSID",
    ord("Q"): "BINPERSID",
}
_UNKNOWN_NAMES = {
    0x96: "BYTEARRAY8",
    0x97: "NEXT_BUFFER",
    ord("p"): "PUT",
    0x85: "TUPLE1",
    0x86: "TUPLE2 of values other than small integers",
    0x87: "TUPLE3",
    ord("t"): "TUPLE",
    0x90: "ADDITEMS",
    0x91: "FROZENSET",
    0x8A: "LONG1 of more than 64 bits",
}


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
    opcode = pickled[position]
    if opcode in _HARMFUL_NAMES:
        raise SnapshotFormatError(f"refusing pickle opcode {_HARMFUL_NAMES[opcode]} at byte {position}. {_HARMFUL}")
    name = _UNKNOWN_NAMES.get(opcode, f"0x{opcode:02x}")
    raise SnapshotFormatError(f"pickle opcode {name} at byte {position} is not supported. {_UNKNOWN}")


def _argument(pickled: memoryview, position: int, layout: str, size: int) -> int:
    if position + 1 + size > len(pickled):
        raise SnapshotFormatError(f"the pickle ends inside the opcode at byte {position}. Was the file cut short?")
    value: int = unpack_from(layout, pickled, position + 1)[0]
    return value


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
    content = pickled.data if body is None else body.data
    parts = [content[: -len(pickle.STOP)], memoryview(extra), memoryview(pickle.STOP)] if extra else [content]
    with collector_paused():
        try:
            # the unpickler reads older protocols byte by byte unless the file can peek
            return _PlainUnpickler(io.BufferedReader(_Parts(parts, allowance), _BYTES_AT_ONCE)).load()
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


class _Parts(io.RawIOBase):
    """Consecutive pieces of memory as one file, which checks the allowance at every read."""

    def __init__(self, parts: Sequence[memoryview], allowance: Allowance) -> None:
        self._parts = list(parts)
        self._allowance = allowance

    def readable(self) -> bool:
        """Whether it can be read, which it can."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer from the first part that has bytes left; 0 at the end."""
        self._allowance.check()
        while self._parts and not len(self._parts[0]):
            self._parts.pop(0)
        if not self._parts:
            return 0
        count = min(len(buffer), len(self._parts[0]))
        buffer[:count] = self._parts[0][:count]
        self._parts[0] = self._parts[0][count:]
        return count


class _PlainUnpickler(pickle.Unpickler):
    """The last line of defense: the opcode walk has already refused every global."""

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        """Refuse every global."""
        name = printable(f"{module_name}.{global_name}")
        raise SnapshotFormatError(f"refusing to import {name} from a snapshot.")
