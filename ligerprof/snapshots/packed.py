"""Read the bytes of a snapshot file, decompressed, within limits that no recording of its size reaches."""

import os
from typing import IO

import numpy as np

from ligerprof.errors import SnapshotFormatError
from ligerprof.files import UnpackError, unpacked
from ligerprof.snapshots.pickles.plain import PICKLE_START
from ligerprof.snapshots.trace import Bytes
from ligerprof.units import GIB, MIB, format_bytes

# xz shrinks real recordings 12 to 60 times, and repetitive ones a few hundred times
_LARGEST_EXPANSION = 1000
_ALWAYS_ALLOWED_BYTES = 64 * MIB
# beyond this size, a compressed file may only expand as real recordings do
_UNUSUAL_BYTES = GIB
_USUAL_EXPANSION = 100
# one read returns at most 2147479552 bytes on Linux
_BYTES_AT_ONCE = GIB
_SHOWN_BYTES = 16
_HINT = "No recording compresses that well; decompress it yourself if you trust it."


def read_bytes(file: IO[bytes]) -> Bytes:
    """The pickle in an open file, decompressed if it is gzip or xz data; always reads from the start.

    Raises:
        SnapshotFormatError: damaged data, or more than this machine's memory.
        OSError: not readable.
    """
    file.seek(0)
    chunks = unpacked(file, allowed_bytes, _HINT)
    if chunks is None:
        return _read_plain(file)
    content = bytearray()
    try:
        for chunk in chunks:
            content += chunk
    except UnpackError as error:
        raise SnapshotFormatError(str(error)) from None
    return np.frombuffer(content, dtype=np.uint8)


def allowed_bytes(packed_bytes: int) -> int:
    """The most bytes that a compressed snapshot may unpack to."""
    expanded = max(_ALWAYS_ALLOWED_BYTES, packed_bytes * _LARGEST_EXPANSION)
    return min(expanded, max(_UNUSUAL_BYTES, packed_bytes * _USUAL_EXPANSION), memory_bytes())


def memory_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _read_plain(file: IO[bytes]) -> Bytes:
    size = os.fstat(file.fileno()).st_size
    start = file.read(_SHOWN_BYTES)
    file.seek(0)
    if start[:1] != PICKLE_START:
        # enough for the error, and a sparse file can have any size
        return np.frombuffer(bytearray(start), dtype=np.uint8)
    if size > memory_bytes():
        raise SnapshotFormatError(
            f"{format_bytes(size)}, more than the {format_bytes(memory_bytes())} of memory that this machine has."
            " Record fewer steps, or read it on a larger machine."
        )
    # unlike a bytearray, it is not cleared first
    content = np.empty(size, dtype=np.uint8)
    filled = 0
    while filled < size and (count := file.readinto(content.data[filled : filled + _BYTES_AT_ONCE])):  # type: ignore[attr-defined]
        filled += count
    return content[:filled]
