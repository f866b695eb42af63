"""Pack a page's data: JSON and columns of integers, compressed, as text that cannot contain markup."""

import base64
import json
import zlib
from typing import Any

import numpy as np

from ligerprof.snapshots.trace import Int64s

_BITS = 7
_MOST_BYTES = 10


class ColumnPacker:
    """Collects columns of integers; `add` returns what the JSON refers to a column by.

    A column holds the differences of successive values, as zigzag varints (7 bits per byte, the lowest first).
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, values: Int64s) -> dict[str, int]:
        """Store a column."""
        encoded = encode_varints(np.diff(values, prepend=0).astype(np.int64))
        reference = {"at": self._size, "count": len(values)}
        self._parts.append(encoded)
        self._size += len(encoded)
        return reference

    def to_text(self, values: Any) -> str:
        """Base64 of a zlib stream: the length of the JSON (4 bytes, little-endian), the JSON, the columns."""
        # a name from a file may contain a lone surrogate; JSON escapes it
        text = json.dumps(values, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")
        whole = b"".join([len(text).to_bytes(4, "little"), text, *self._parts])
        return base64.b64encode(zlib.compress(whole, 9)).decode("ascii")


def encode_varints(values: Int64s) -> bytes:
    """Signed integers as zigzag varints."""
    zigzag = ((values << 1) ^ (values >> 63)).view(np.uint64)
    lengths = np.ones(len(values), dtype=np.int64)
    for count in range(1, _MOST_BYTES):
        lengths += zigzag >= np.uint64(1 << (_BITS * count))
    ends = np.cumsum(lengths)
    encoded = np.empty(int(ends[-1]) if len(ends) else 0, dtype=np.uint8)
    starts = ends - lengths
    for place in range(_MOST_BYTES):
        within = np.flatnonzero(lengths > place)
        digits = (zigzag[within] >> np.uint64(_BITS * place)) & np.uint64(127)
        more = (lengths[within] > place + 1).astype(np.uint8) << 7
        encoded[starts[within] + place] = digits.astype(np.uint8) | more
    return encoded.tobytes()
