"""Find lists of references that are alike in the bytes of a pickle: torch writes every allocation's stack anew."""

import re

import numpy as np

from ligerprof.snapshots.pickles.layout import WORD_BYTES
from ligerprof.snapshots.trace import Bytes, Int64s

# what follows the head of a list that holds references alone: several between a mark and its end, or a single one
_REFERENCES = re.compile(rb"(?s)\((?:j.{4}|h.)+e|(?:j.{4}|h.)a")
_ODD_NUMBER = 0x9E3779B97F4A7C15


def like_others(data: Bytes, contents: Int64s, size: int) -> tuple[Int64s, Int64s]:
    """Which of some lists have the same references as another, and which are those others.

    Args:
        contents: where the lists begin, behind their heads; a word more than `size` follows each.
        size: bytes of each.

    Returns:
        Indices of copies, and of the list that each is like; no list is in both.
    """
    width = -(-size // WORD_BYTES)
    windows = np.ndarray((len(data) - width * WORD_BYTES + 1,), f"V{width * WORD_BYTES}", data, strides=(1,))
    words = windows[contents].view(np.uint64).reshape(-1, width)
    words[:, -1] &= np.uint64(2 ** (8 * (size - (width - 1) * WORD_BYTES)) - 1)
    # sums that differ for different lists nearly always; the lists themselves are compared then
    sums = words @ np.cumprod(np.full(width, _ODD_NUMBER, dtype=np.uint64))
    _, firsts, group = np.unique(sums, return_index=True, return_inverse=True)
    refers = [
        _REFERENCES.fullmatch(data[start : start + size].tobytes()) is not None for start in contents[firsts].tolist()
    ]
    first = firsts[group]
    alike = np.array(refers, dtype=bool)[group] & (words == words[first]).all(axis=1)
    alike[firsts] = False
    copies = np.flatnonzero(alike)
    return copies, first[copies]
