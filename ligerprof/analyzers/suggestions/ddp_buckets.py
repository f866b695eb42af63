"""When DDP's first buckets are freed, which differs from run to run.

In its second step, DDP builds its buckets anew, in the order in which gradients became ready, and drops the first ones.
The process group may still hold these: they are freed at a collective once its watchdog thread, which looks every tenth
of a second, has seen that their reductions have ended (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp,
`shelvesToUnstash_`). DDP's next collectives are the one before it builds its buckets, and the first of each backward
pass.
"""

from collections.abc import Iterator

import numpy as np

from ligerprof.analyzers.suggestions.case import Case
from ligerprof.analyzers.suggestions.program import Framework
from ligerprof.analyzers.suggestions.replayed_change import Edit, peak_after
from ligerprof.analyzers.suggestions.rows import Row

_FIRST = r"\A\S*nn/parallel/distributed\.py:_ddp_init_helper$"
_REBUILT = r"\A\S*nn/parallel/distributed\.py:_pre_forward$"
# nn/parallel/distributed.py: the smallest bucket; smaller tensors are maps of unused parameters
_LEAST_BUCKET_BYTES = 2**20
# kWatchdogThreadSleepMillis
_WATCHDOG_US = 100_000


def peaks_with_other_timings(row: Row, case: Case) -> list[int]:
    """The new peaks if the first buckets live shorter or longer than recorded; none without DDP."""

    def peak_until(moment: int) -> tuple[int, int] | None:
        return peak_after(lambda: _with_buckets_until(row, case, moment), case.book, case.window, case.request)

    found = [peak_until(moment) for moment in _ends(row, case)]
    return [peak[0] for peak in found if peak is not None]


def edits_with_other_timings(row: Row, case: Case) -> Iterator[Edit]:
    """The row's effect with each of these timings."""
    edits = (_with_buckets_until(row, case, until) for until in _ends(row, case))
    return (edit for edit in edits if edit is not None)


def _with_buckets_until(row: Row, case: Case, until: int) -> Edit | None:
    edit, first = row.edit(case), case.blocks_from(_FIRST)
    if edit is None:
        return None
    sizes, stops = edit.sizes(first), edit.stops(first)
    ends = np.full(len(first), until)
    edit.release(sizes, np.minimum(ends, stops), stops)
    edit.hold(sizes, stops, np.maximum(ends, stops))
    return edit


def _ends(row: Row, case: Case) -> list[int]:
    """The moments after which the first buckets may be gone, the earliest first."""
    if case.program.engine is not Framework.DDP or not row.keeps_buckets:
        return []
    rebuilt = case.blocks_from(_REBUILT)
    rebuilt = rebuilt[case.sizes(rebuilt) >= _LEAST_BUCKET_BYTES]
    first = case.blocks_from(_FIRST)
    if not len(first) or not len(rebuilt):
        return []
    built = int(case.edit().starts(rebuilt).min())
    starts = [start for start, _ in case.backwards if start >= built]
    collectives = [_first_reduction(case, start) + 1 for start in starts]
    reduced = max((end for _, end in case.backwards if end <= built), default=built)
    earliest = min(built, int(case.edit().stops(first).max()))
    return [earliest, *collectives[: 1 + _missed_by_watchdog(case, reduced, collectives)]]


def _first_reduction(case: Case, backward: int) -> int:
    """When the first gradient of a backward pass is there."""
    made = case.allocated_within(case.gradients, backward, case.replayed.last_moment)
    return int(case.replayed.allocated_by[made[0]]) if len(made) else backward


def _missed_by_watchdog(case: Case, reduced: int, collectives: list[int]) -> int:
    """How many of these collectives may come before the watchdog looks; 0 if events have no times."""
    times = case.replayed.trace.numbers("time_us")
    if not len(times) or not collectives:
        return 0
    since = times[np.minimum(collectives, len(times) - 1)] - times[max(reduced - 1, 0)]
    return int(np.count_nonzero(since < _WATCHDOG_US))
