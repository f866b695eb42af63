"""Load a pickle of plain data: no global is ever resolved, nothing is called or built."""

import gc
import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from ligerprof.errors import SnapshotFormatError
from ligerprof.snapshots.pickles.opcodes import require_plain_data

_WRITE_IT = "Write one with torch.cuda.memory._dump_snapshot() or `ligerprof step`."


def load_plain_data(pickled: bytes, *, extra: bytes = b"") -> Any:
    """Load a pickle of dicts, lists, text and numbers.

    Args:
        extra: opcodes of our own that follow, in place of the STOP at its end.

    Raises:
        SnapshotFormatError: anything else is in it, or it is damaged.
    """
    if pickled[:1] != b"\x80":
        raise SnapshotFormatError(f"not a pickle: it begins with {bytes(pickled[:8])!r}. {_WRITE_IT}")
    require_plain_data(pickled)
    with collector_off():
        try:
            # from a reader that can look ahead, older protocols are not read byte by byte
            return _PlainUnpickler(io.BufferedReader(io.BytesIO(_extended(pickled, extra)))).load()
        except SnapshotFormatError:
            raise
        # a damaged pickle can raise nearly anything; none of it is a bug of ours
        except Exception as error:
            raise SnapshotFormatError(f"damaged pickle: {type(error).__name__}: {str(error)[:120]}.") from None


class _PlainUnpickler(pickle.Unpickler):
    """The last line of defence: the opcode walk has refused every global already."""

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        """Refuse every global."""
        raise SnapshotFormatError(f"refusing to import {module_name}.{global_name} from a snapshot.")


def _extended(pickled: bytes, extra: bytes) -> bytes:
    return pickled[: -len(pickle.STOP)] + extra + pickle.STOP if extra else pickled


@contextmanager
def collector_off() -> Iterator[None]:
    """Loading makes millions of objects and no garbage; the collector would walk them again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
