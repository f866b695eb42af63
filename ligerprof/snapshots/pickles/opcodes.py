"""Decide whether a pickle is plain data by walking its opcodes before loading anything."""

import re
from collections.abc import Callable
from struct import unpack_from

from ligerprof.errors import SnapshotFormatError

_HINT = "A memory snapshot holds only dicts, lists, text and numbers: do not load this file with other tools."

# What torch's C++ pickler and Python's (protocols 2 to 5) write for dicts, lists, text, numbers
# and pairs of integers. All other opcodes are refused: those that import, call or build; tuples
# other than pairs of integers (nested tuples take exponential time to hash); those that declare
# lengths which plain data does not need.
# LONG1 of nine bytes: torch writes an unknown line, -1, as an unsigned 64-bit integer.
_INTEGER = rb"(?:K.|M..|J....|\x8a(?:\x00|\x01.|\x02..|\x03...|\x04.{4}|\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}|\x09.{9}))"
_REFERENCE = rb"(?:j....|h.)"
# the start of an event's dict, eight keys at once; a snapshot can have a million in a row
_VALUE = rb"(?:j....|h.|\x8a\x07.{7}|\x8a\x06.{6}|K.|J....|M..)"
_EVENT = rb"\}\x94\(" + (_REFERENCE + _VALUE) * 8
# most texts are short; the lengths of the others are checked one by one
_TEXT = rb"\x8c(?:" + b"|".join(re.escape(bytes([length])) + b".{%d}" % length for length in range(1, 64)) + rb")"
_ANY = rb"j....|h.|\x94+|[()}\]ueas\x88\x89N]|" + _INTEGER + rb"(?:" + _INTEGER + rb"\x86)?|q.|G.{8}|" + _TEXT
# bounded, because re keeps memory for each repetition of an unbounded one
_RUN = re.compile(rb"(?s)(?:" + _EVENT + rb"|" + _ANY + rb"){1,4096}")
_BINUNICODE, _SHORT_BINUNICODE, _LONG_BINPUT, _LONG1 = 0x58, 0x8C, 0x72, 0x8A
_PROTO, _FRAME, _STOP = 0x80, 0x95, 0x2E
_NEWEST_PROTOCOL = 5
_REFUSED = {
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
    0x96: "BYTEARRAY8",
    0x97: "NEXT_BUFFER",
    ord("p"): "PUT",
    0x85: "TUPLE1",
    0x86: "TUPLE2 of values other than integers",
    0x87: "TUPLE3",
    ord("t"): "TUPLE",
    0x90: "ADDITEMS",
    0x91: "FROZENSET",
}


def require_plain_data(pickled: bytes) -> None:
    """Walk every opcode up to STOP without loading anything.

    Raises:
        SnapshotFormatError: an opcode that plain data does not need, a length beyond the end of
            the data, a memo index that no earlier opcode can have filled, or no STOP.
    """
    position, end = 0, len(pickled)
    while position < end:
        run = _RUN.match(pickled, position)
        if run is not None:
            position = run.end()
        elif pickled[position] == _STOP:
            return
        else:
            position = _STEPS.get(pickled[position], _refuse)(pickled, position)
    raise SnapshotFormatError(f"the pickle ends at byte {end} before it is complete. Was the file cut short?")


def _refuse(pickled: bytes, position: int) -> int:
    opcode = pickled[position]
    name = _REFUSED.get(opcode, f"0x{opcode:02x}")
    raise SnapshotFormatError(f"refusing pickle opcode {name} at byte {position}. {_HINT}")


def _argument(pickled: bytes, position: int, layout: str, size: int) -> int:
    if position + 1 + size > len(pickled):
        raise SnapshotFormatError(f"the pickle ends inside the opcode at byte {position}. Was the file cut short?")
    value: int = unpack_from(layout, pickled, position + 1)[0]
    return value


def _skip_sized(kind: str, layout: str, size: int) -> Callable[[bytes, int], int]:
    def skip(pickled: bytes, position: int) -> int:
        length = _argument(pickled, position, layout, size)
        after = position + 1 + size + length
        if after > len(pickled):
            raise SnapshotFormatError(
                f"{kind} of {length} bytes declared at byte {position} of {len(pickled)}. Was the file cut short?"
            )
        return after

    return skip


def _skip_protocol(pickled: bytes, position: int) -> int:
    version = _argument(pickled, position, "<B", 1)
    if version > _NEWEST_PROTOCOL:
        raise SnapshotFormatError(
            f"pickle protocol {version} at byte {position} is unknown. Known: 2 to {_NEWEST_PROTOCOL}."
        )
    return position + 2


def _skip_frame(pickled: bytes, position: int) -> int:
    length = _argument(pickled, position, "<Q", 8)
    if position + 9 + length > len(pickled):
        raise SnapshotFormatError(
            f"a frame of {length} bytes declared at byte {position} of {len(pickled)}. Was the file cut short?"
        )
    return position + 9


def _skip_memo_put(pickled: bytes, position: int) -> int:
    index = _argument(pickled, position, "<I", 4)
    # each object takes at least a byte, so a valid index is smaller than its position
    if index > position:
        raise SnapshotFormatError(f"memo index {index} at byte {position} is larger than the number of objects so far.")
    return position + 5


_STEPS: dict[int, Callable[[bytes, int], int]] = {
    _BINUNICODE: _skip_sized("text", "<I", 4),
    _SHORT_BINUNICODE: _skip_sized("text", "<B", 1),
    _LONG1: _skip_sized("an integer", "<B", 1),
    _LONG_BINPUT: _skip_memo_put,
    _PROTO: _skip_protocol,
    _FRAME: _skip_frame,
}
