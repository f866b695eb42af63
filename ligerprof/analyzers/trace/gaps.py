"""Classify idle time of a GPU: late launch, launch in progress, or work already queued."""

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from ligerprof.analyzers.trace.events import ABSENT, Events, Numbers, Times

# microseconds; a gap that equals a bound counts in the range above it
SIZE_BOUNDS_US = (0.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 1000.0, float("inf"))


class GapCause(str, Enum):
    """Why a device was idle, according to the call that launched its next work.

    The call began after the device became idle (host_late), was in progress then (launching), or
    had ended before (queued: device latency or an order between streams). The call is missing from
    the trace (unknown), or no work follows in the window (end).
    """

    HOST_LATE = "host_late"
    LAUNCHING = "launching"
    QUEUED = "queued"
    UNKNOWN = "unknown"
    END = "end"


CAUSES = tuple(GapCause)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gaps:
    """The idle spans of one device within a window, sorted by start.

    Attributes:
        starts: microseconds of the trace's clock.
        ends: microseconds of the trace's clock.
        causes: index into CAUSES.
        next_work: index of the work that ended the gap; ABSENT for the last gap.
    """

    starts: Times
    ends: Times
    causes: Numbers
    next_work: Numbers

    @property
    def sizes(self) -> Times:
        """Durations in microseconds."""
        return self.ends - self.starts

    def of_cause(self, cause: GapCause) -> npt.NDArray[np.bool_]:
        """Mask of the gaps with this cause."""
        chosen: npt.NDArray[np.bool_] = self.causes == CAUSES.index(cause)
        return chosen


def launching_calls(work: Events, calls: Events) -> Numbers:
    """For each piece of GPU work, the index of the host call that launched it, or ABSENT.

    A CUDA graph's launch is the call of every kernel in the graph.
    """
    known = np.flatnonzero(calls.correlations != ABSENT)
    if not len(known):
        return np.full(len(work), ABSENT, dtype=np.int64)
    # stable: if two calls share a correlation id, the first in the file wins
    known = known[np.argsort(calls.correlations[known], kind="stable")]
    correlations = calls.correlations[known]
    places = np.searchsorted(correlations, work.correlations)
    places = np.minimum(places, len(known) - 1)
    found = (correlations[places] == work.correlations) & (work.correlations != ABSENT)
    return np.where(found, known[places], ABSENT)


def find_gaps(work: Events, launches: Numbers, calls: Events, window: tuple[float, float]) -> Gaps:
    """The idle spans of one device: the window less the union of its kernels, copies and fills.

    Args:
        work: the device's work on all streams.
        launches: result of `launching_calls` for this work.
        calls: the host's calls.
        window: start and end; idle time before the first and after the last work counts.
    """
    order = np.argsort(work.starts, kind="stable")
    order = order[(work.ends[order] > window[0]) & (work.starts[order] < window[1])]
    starts = work.starts[order]
    busy_until = np.maximum.accumulate(np.concatenate(([window[0]], work.ends[order])))
    gap_ends = np.append(starts, window[1])
    is_gap = gap_ends > busy_until
    next_work = np.append(order, ABSENT)[is_gap]
    gap_starts = busy_until[is_gap]
    return Gaps(
        starts=gap_starts,
        ends=gap_ends[is_gap],
        causes=_causes(gap_starts, next_work, launches, calls),
        next_work=next_work,
    )


def _causes(gap_starts: Times, next_work: Numbers, launches: Numbers, calls: Events) -> Numbers:
    causes = np.full(len(gap_starts), CAUSES.index(GapCause.END))
    follows = np.flatnonzero(next_work != ABSENT)
    launch = launches[next_work[follows]]
    causes[follows] = CAUSES.index(GapCause.UNKNOWN)
    follows, launch = follows[launch != ABSENT], launch[launch != ABSENT]
    idle_since = gap_starts[follows]
    causes[follows] = np.select(
        [calls.starts[launch] >= idle_since, calls.ends[launch] > idle_since],
        [CAUSES.index(GapCause.HOST_LATE), CAUSES.index(GapCause.LAUNCHING)],
        CAUSES.index(GapCause.QUEUED),
    )
    return causes
