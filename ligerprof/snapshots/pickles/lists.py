"""Find pickled lists whose bytes are equal."""

import re

import numpy as np

from ligerprof.snapshots.pickles.layout import WORD_BYTES
from ligerprof.snapshots.trace import Bytes, Int64s

# the contents of a list that holds only references: several between MARK and APPENDS, or one and APPEND
_REFERENCES = re.compile(rb"(?s)\((?:j.{4}|h.)+e|(?:j.{4}|h.)a")
_ODD_NUMBER = 0x9E3779B97F4A7C15


def equal_lists(data: Bytes, contents: Int64s, size: int) -> tuple[Int64s, Int64s]:
    """Find lists of references whose bytes equal an earlier list's.

    Args:
        contents: offsets of the lists' contents; the data goes on for a word after each list.
        size: bytes of each list.

    Returns:
        Indices of the copies and of each one's original; no list is both.
    """
    width = -(-size // WORD_BYTES)
    windows = np.ndarray((len(data) - width * WORD_BYTES + 1,), f"V{width * WORD_BYTES}", data, strides=(1,))
    words = windows[contents].view(np.uint64).reshape(-1, width)
    words[:, -1] &= np.uint64(2 ** (8 * (size - (width - 1) * WORD_BYTES)) - 1)
    # the sums of different lists rarely collide; the lists themselves are compared below
    sums = words @ np.cumprod(np.full(width, _ODD_NUMBER, dtype=np.uint64))
    _, firsts, group = np.unique(sums, return_index=True, return_inverse=True)
    texts = (data[start : start + size].tobytes() for start in contents[firsts].tolist())
    refers = np.array([_REFERENCES.fullmatch(text) is not None for text in texts], dtype=bool)
    first = firsts[group]
    alike = refers[group] & (words == words[first]).all(axis=1)
    alike[firsts] = False
    copies = np.flatnonzero(alike)
    return copies, first[copies]
