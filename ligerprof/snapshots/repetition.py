"""Find the part of a trace in which the same events repeat, as the steps of a training loop do."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ligerprof.snapshots.events import EventColumns
from ligerprof.snapshots.trace import Int64s

# events that are compared to find the next occurrence of those before; fewer than a training step has
_WINDOW = 256
# a trace with fewer events is replayed as fast as it is searched
_LEAST_EVENTS = 8 * _WINDOW
_LEAST_COUNT = 4
_MOST_PERIODS_TRIED = 8
# a loop that does not return to its state within a few turns hardly ever does
MOST_TURNS_COMPARED = 8
# odd numbers; the products wrap around
_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93)


@dataclass(frozen=True, kw_only=True, slots=True)
class Repetition:
    """Events `start` up to `end` are those from `start` up to `start + period`, repeated `count` times.

    Attributes:
        period: number of events.
    """

    start: int
    period: int
    count: int

    @property
    def end(self) -> int:
        """Index of the event after the last whole period."""
        return self.start + self.period * self.count

    @property
    def turns(self) -> Iterator[range]:
        """The events of each period."""
        starts = range(self.start, self.end, self.period)
        return (range(start, start + self.period) for start in starts)


def find_repetition(columns: EventColumns) -> Repetition | None:
    """The longest repetition around the middle of the trace, None if there is none worth using."""
    if len(columns.actions) < _LEAST_EVENTS:
        return None
    middle = len(columns.actions) // 2
    found: list[Repetition] = []
    for period in _periods(columns, middle):
        # several periods repeat where one does
        if not any(period % one.period == 0 for one in found):
            around = _around(columns, period, middle)
            found += [] if around is None else [around]
    return max(found, key=lambda one: one.period * one.count, default=None)


def _periods(columns: EventColumns, middle: int) -> list[int]:
    """Distances from the events in the middle to where the same events seem to occur again."""
    windows = _window_sums(columns)
    again = np.flatnonzero(windows[middle + 1 :] == windows[middle])[:_MOST_PERIODS_TRIED]
    return [1 + int(distance) for distance in again]


def _window_sums(columns: EventColumns) -> npt.NDArray[np.uint64]:
    """A number for the events from each one on, equal for equal events."""
    parts = (columns.actions, columns.addresses, columns.sizes)
    events = sum(
        (part.view(np.uint64) * np.uint64(factor) for part, factor in zip(parts, _FACTORS, strict=True)),
        start=np.zeros(len(columns.actions), dtype=np.uint64),
    )
    # the high bits of a product depend on all bits of its factors, the low bits do not
    events ^= events >> np.uint64(29)
    powers = np.full(len(events), _FACTORS[1], dtype=np.uint64).cumprod(dtype=np.uint64)
    inverse = np.full(len(events), pow(_FACTORS[1], -1, 2**64), dtype=np.uint64).cumprod(dtype=np.uint64)
    totals = np.cumsum(events * powers, dtype=np.uint64)
    sums: npt.NDArray[np.uint64] = (totals[_WINDOW:] - totals[:-_WINDOW]) * inverse[:-_WINDOW]
    return sums


def _around(columns: EventColumns, period: int, middle: int) -> Repetition | None:
    """The repetition with this period that contains the middle."""
    alike = np.ones(len(columns.actions) - period, dtype=bool)
    for column in (columns.actions, columns.addresses, columns.sizes):
        alike &= column[period:] == column[:-period]
    differs: Int64s = np.flatnonzero(~alike).astype(np.int64)
    place = int(np.searchsorted(differs, middle))
    start = int(differs[place - 1]) + 1 if place else 0
    stop = int(differs[place]) if place < len(differs) else len(alike)
    count = (stop - start) // period + 1
    return Repetition(start=start, period=period, count=count) if count >= _LEAST_COUNT else None
