"""Load a pickle of plain data: no global is resolved, and nothing is called or built."""

import io
import pickle
from collections.abc import Sequence
from typing import Any, NoReturn

from ligerprof.errors import SnapshotFormatError
from ligerprof.snapshots.collector import collector_paused
from ligerprof.snapshots.pickles.allowance import Allowance
from ligerprof.snapshots.pickles.opcodes import FRAME, FRAME_HEAD_BYTES, PROTO_BYTES, require_plain_data
from ligerprof.snapshots.trace import Bytes
from ligerprof.text import printable

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
