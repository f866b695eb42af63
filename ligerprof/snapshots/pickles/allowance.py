"""The processor time and memory that loading a pickle may take, so that crafted files end in an error."""

import os
import re
import time
from math import inf

from ligerprof.errors import SnapshotFormatError
from ligerprof.units import MIB, format_bytes

# several times what recordings take; small pickles have limits that keep crafted files short, larger ones may take long
SMALL_BYTES = 64 * MIB
_SECONDS = 5.0
_MEMORY_BYTES = 160 * MIB
_MEMORY_PER_SMALL_BYTE = 2
# recordings take up to four bytes for each
MEMORY_PER_BYTE = 16
_SECONDS_PER_BYTE = 1e-6
_STATM, _STATM_BYTES = "/proc/self/statm", 256
_MEMINFO, _MEMINFO_BYTES, _AVAILABLE = "/proc/meminfo", 256, re.compile(rb"MemAvailable: *(\d+) kB")


class LimitError(SnapshotFormatError):
    """Loading took more time or memory than any recording of its size."""


class Allowance:
    """Counts the processor time and memory of this process since it was made.

    Args:
        unpacked_bytes: size of the pickle.
    """

    def __init__(self, unpacked_bytes: int) -> None:
        beyond_bytes = max(0, unpacked_bytes - SMALL_BYTES)
        self._seconds = most_seconds(_SECONDS, unpacked_bytes)
        self._memory_bytes = (
            _MEMORY_BYTES + _MEMORY_PER_SMALL_BYTE * (unpacked_bytes - beyond_bytes) + MEMORY_PER_BYTE * beyond_bytes
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
            " needs. Was the file crafted?"
        )


def most_seconds(least: float, unpacked_bytes: int) -> float:
    """The processor time that a pickle may take; a large one may take any."""
    return least + _SECONDS_PER_BYTE * unpacked_bytes if unpacked_bytes <= SMALL_BYTES else inf


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


def available_bytes() -> float:
    """Memory that the system can give; infinite where it does not say."""
    try:
        with open(_MEMINFO, "rb", buffering=0) as file:  # noqa: PTH123 - as above
            found = _AVAILABLE.search(file.read(_MEMINFO_BYTES))
    except OSError:
        return inf
    return inf if found is None else int(found[1]) * 1024
