"""Classify idle time of a GPU: late launch, launch in progress, or work already queued."""

from dataclasses import dataclass

import numpy as np

from ligerprof.analyzers.trace.events import ABSENT, Events, Numbers, Times
from ligerprof.words import ExplainedWord

# microseconds; a gap that equals a bound counts in the range above it
SIZE_BOUNDS_US = (0.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 1000.0, float("inf"))


class GapCause(ExplainedWord):
    """Why a device was idle, according to the call that launched its next work.

    The call began after the device became idle (host_late), was in progress then (launching), or
    had ended before (queued: device latency or an order between streams). The call is missing from
    the trace (unknown), or no work follows in the window (end).
    """

    HOST_LATE = "host_late", "host launched late"
    LAUNCHING = "launching", "launch in progress"
    QUEUED = "queued", "between queued kernels"
    UNKNOWN = "unknown", "launch not in the trace"
    END = "end", "after the last kernel"


CAUSES = tuple(GapCause)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gaps:
    """The idle spans of one device within a window, sorted by start.

    Attributes:
        starts, ends: microseconds of the trace's clock.
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


def find_gaps(work: Events, launches: Numbers, calls: Events, window: tuple[float, float]) -> Gaps:
    """The idle spans of one device: the window less the union of its kernels, copies and fills.

    Args:
        work: the device's work on all streams.
        launches: per piece of work, the index of the call that launched it, or ABSENT.
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
    # the index ABSENT, -1, selects the appended value
    launch = np.append(launches, ABSENT)[next_work]
    began, returned = (np.append(times, 0.0)[launch] for times in (calls.starts, calls.ends))
    causes = {
        GapCause.END: next_work == ABSENT,
        GapCause.UNKNOWN: launch == ABSENT,
        GapCause.HOST_LATE: began >= gap_starts,
        GapCause.LAUNCHING: returned > gap_starts,
    }
    return Gaps(
        starts=gap_starts,
        ends=gap_ends[is_gap],
        causes=np.select(list(causes.values()), list(map(CAUSES.index, causes)), CAUSES.index(GapCause.QUEUED)),
        next_work=next_work,
    )
