"""Unions of time spans."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.float64]
Spans = tuple[Times, Times]

NOTHING: Spans = (np.empty(0), np.empty(0))


def group_indices(keys: npt.NDArray[np.int64]) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """Yield each distinct key, ascending, with the indices where it occurs; sorts once."""
    order = np.argsort(keys, kind="stable")
    for indices in np.split(order, np.flatnonzero(np.diff(keys[order])) + 1):
        if len(indices):
            yield int(keys[indices[0]]), indices


def clip(starts: Times, ends: Times, window: tuple[float, float]) -> Spans:
    """Clip each span to the window; spans outside it become empty but keep their index."""
    clipped = np.clip(starts, *window)
    return clipped, np.maximum(np.clip(ends, *window), clipped)


def union(starts: Times, ends: Times) -> Spans:
    """Merge spans into sorted spans that neither overlap nor touch."""
    if not len(starts):
        return NOTHING
    order = np.argsort(starts, kind="stable")
    starts, latest = starts[order], np.maximum.accumulate(ends[order])
    opens = np.concatenate(([True], starts[1:] > latest[:-1]))
    closes = np.concatenate((opens[1:], [True]))
    return starts[opens], latest[closes]


def length(spans: Spans) -> float:
    """Total length of spans that do not overlap."""
    return float(np.sum(spans[1] - spans[0]))


def contains(spans: Spans, moments: Times) -> npt.NDArray[np.bool_]:
    """Whether each moment lies in one of the spans, which are sorted and do not overlap."""
    starts, ends = spans
    if not len(starts):
        return np.zeros(len(moments), dtype=np.bool_)
    before = np.searchsorted(starts, moments, side="right") - 1
    return (before >= 0) & (moments < ends[np.maximum(before, 0)])
