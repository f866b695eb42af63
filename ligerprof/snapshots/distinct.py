"""Find distinct rows of a table and distinct numbers, so that equal ones are looked at once."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ligerprof.snapshots.trace import Int64s

Flags = npt.NDArray[np.bool_]

_ODD_NUMBER = 0x9E3779B97F4A7C15
# entries of a table of all numbers that can occur, per number; larger ones take longer than sorting
_LARGEST_TABLE = 2


def distinct_rows(columns: Sequence[npt.NDArray[np.generic]]) -> tuple[Int64s, Int64s]:
    """Compare rows whose columns hold integers or flags.

    Returns:
        Index of the first row of each kind, and the kind of each row.
    """
    # column by column: a table of them takes more memory than the recording
    sums, factor = np.zeros(len(columns[0]), dtype=np.uint64), 1
    for column in columns:
        factor = factor * _ODD_NUMBER % 2**64
        sums += column.astype(np.int64).view(np.uint64) * np.uint64(factor)
    _, first, kind = np.unique(sums, return_index=True, return_inverse=True)
    if not all((column[first][kind] == column).all() for column in columns):
        # rows with equal sums that differ, which are rare
        table = np.stack([column.astype(np.int64) for column in columns])
        _, first, kind = np.unique(table, axis=1, return_index=True, return_inverse=True)
    return first, kind.reshape(-1)


def distinct(numbers: Int64s) -> Int64s:
    """The distinct numbers in ascending order; np.unique would first import numpy's masked arrays for this."""
    ordered = np.sort(numbers)
    found: Int64s = ordered[np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]]
    return found


def is_among(numbers: Int64s, chosen: Iterable[int] | Int64s) -> Flags:
    """Whether each number is one of the chosen; np.isin would first import numpy's masked arrays for this."""
    values = np.asarray(chosen if isinstance(chosen, np.ndarray) else list(chosen), dtype=np.int64)
    if not len(values):
        return np.zeros(len(numbers), dtype=bool)
    found = distinct(values)
    places = np.minimum(np.searchsorted(found, numbers), len(found) - 1)
    among: Flags = found[places] == numbers
    return among


def common(numbers: Int64s, others: Int64s) -> Int64s:
    """The distinct numbers that occur in both, in ascending order."""
    return distinct(numbers[is_among(numbers, others)])


def numbered(numbers: Int64s) -> tuple[Int64s, Int64s]:
    """The distinct numbers in ascending order, and the index of each number among them.

    Faster than np.unique if there are few distinct ones: numpy sorts numbers faster than their indices.
    """
    found = distinct(numbers)
    index: Int64s = np.searchsorted(found, numbers)
    return found, index


def number_pairs(firsts: Int64s, seconds: Int64s) -> Int64s:
    """A number for each pair of numbers from 0, ascending without gaps, equal for equal pairs.

    The highest numbers must not be larger than the count of any array that fits in memory.
    """
    width = int(seconds.max(initial=0)) + 1
    keys, limit = firsts * width + seconds, (int(firsts.max(initial=0)) + 1) * width
    if limit > _LARGEST_TABLE * len(keys):
        return numbered(keys)[1]
    occurs = np.zeros(limit, dtype=bool)
    occurs[keys] = True
    pairs: Int64s = (np.cumsum(occurs) - 1)[keys]
    return pairs


def distinct_numbers(numbers: Int64s, limit: int) -> tuple[Int64s, Int64s]:
    """Compare numbers in [0, limit); faster than np.unique if the limit is not much larger than their count.

    Returns:
        Index of the first of each kind, in ascending order of the numbers, and the kind of each number.
    """
    if limit > _LARGEST_TABLE * len(numbers):
        _, first, kind = np.unique(numbers, return_index=True, return_inverse=True)
        return first, kind
    first = np.full(limit, -1, dtype=np.int64)
    # of several values for one place, the last one stays
    first[numbers[::-1]] = np.arange(len(numbers))[::-1]
    occurs = first >= 0
    return first[occurs], (np.cumsum(occurs) - 1)[numbers]
