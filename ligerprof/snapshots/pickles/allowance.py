"""The processor time and memory that loading a pickle may take, so that crafted files end in an error."""

import os
import time

from ligerprof.errors import SnapshotFormatError
from ligerprof.units import MIB, format_bytes

# several times what recordings take; large files may take more of both
_SECONDS = 5.0
_SECONDS_PER_BYTE = 60e-9
_MEMORY_BYTES = 160 * MIB
_MEMORY_PER_UNPACKED_BYTE = 2
MEMORY_PER_STORED_BYTE = 24
LARGE_BYTES = 10 * MIB
_STATM, _STATM_BYTES = "/proc/self/statm", 256


class LimitError(SnapshotFormatError):
    """Loading took more time or memory than any recording of its size."""


class Allowance:
    """Counts the processor time and memory of this process since it was made.

    Args:
        unpacked_bytes: size of the pickle.
        stored_bytes: size of its file if that is compressed; None if it is as large as the pickle.
    """

    def __init__(self, unpacked_bytes: int, stored_bytes: int | None = None) -> None:
        beyond_bytes = max(0, (unpacked_bytes if stored_bytes is None else stored_bytes) - LARGE_BYTES)
        self._seconds = _SECONDS + _SECONDS_PER_BYTE * beyond_bytes
        self._memory_bytes = (
            _MEMORY_BYTES + _MEMORY_PER_UNPACKED_BYTE * unpacked_bytes + MEMORY_PER_STORED_BYTE * beyond_bytes
        )
        self._unpacked_bytes = unpacked_bytes
        self._started = time.process_time()
        self._memory_before = resident_bytes()

    def check(self) -> None:
        """Raise a LimitError if either is used up."""
        if time.process_time() - self._started > self._seconds:
            self._stop(f"{self._seconds:.0f} seconds")
        if resident_bytes() - self._memory_before > self._memory_bytes:
            self._stop(f"{format_bytes(self._memory_bytes)} of memory")

    def _stop(self, limit: str) -> None:
        raise LimitError(
            f"loading {format_bytes(self._unpacked_bytes)} takes more than {limit}, which no recording of this size"
            " needs. Was the file crafted? Decompress it yourself if you trust it."
        )


def resident_bytes() -> int:
    """Memory of this process; 0 where the system does not say."""
    try:
        # a command asks for it many times, and opening a Path takes several times as long
        file = os.open(_STATM, os.O_RDONLY)
        try:
            return int(os.read(file, _STATM_BYTES).split()[1]) * os.sysconf("SC_PAGE_SIZE")
        finally:
            os.close(file)
    except OSError:
        return 0
