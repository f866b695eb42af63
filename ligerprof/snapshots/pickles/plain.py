"""Load a pickle of plain data: no global is resolved, and nothing is called or built."""

import io
import pickle
from typing import Any, NoReturn

from ligerprof.errors import SnapshotFormatError
from ligerprof.snapshots.collector import collector_paused
from ligerprof.snapshots.pickles.opcodes import require_plain_data

HOW_TO_RECORD = "Write one with torch.cuda.memory._dump_snapshot() or `ligerprof step`."


def load_plain_data(pickled: bytes, *, extra: bytes = b"") -> Any:
    """Load a pickle of dicts, lists, text and numbers.

    Args:
        extra: our own opcodes, inserted before STOP.

    Raises:
        SnapshotFormatError: it holds anything else, or is damaged.
    """
    if pickled[:1] != b"\x80":
        raise SnapshotFormatError(f"not a pickle: it starts with {bytes(pickled[:8])!r}. {HOW_TO_RECORD}")
    require_plain_data(pickled)
    extended = pickled[: -len(pickle.STOP)] + extra + pickle.STOP if extra else pickled
    with collector_paused():
        try:
            # the unpickler reads older protocols byte by byte unless the file can peek
            return _PlainUnpickler(io.BufferedReader(io.BytesIO(extended))).load()
        except SnapshotFormatError:
            raise
        # a damaged pickle can raise nearly any exception; none of them is our bug
        except Exception as error:
            raise SnapshotFormatError(f"damaged pickle: {type(error).__name__}: {str(error)[:120]}.") from None


class _PlainUnpickler(pickle.Unpickler):
    """The last line of defense: the opcode walk has already refused every global."""

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        """Refuse every global."""
        raise SnapshotFormatError(f"refusing to import {module_name}.{global_name} from a snapshot.")
