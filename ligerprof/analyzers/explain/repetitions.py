"""Find where the program's steps start: by phases, else by the lines of the script's own loop."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from ligerprof.analyzers.attribution.blocks import Attribution
from ligerprof.analyzers.attribution.phases import phase_code
from ligerprof.analyzers.attribution.stacks import PythonCall
from ligerprof.analyzers.explain.steps import step_starts
from ligerprof.roles import Phase
from ligerprof.snapshots.trace import Int64s

_LEAST_STARTS = 3
# the newest call sites are searched for a loop
_MOST_EVENTS = 200_000


def repetitions(attribution: Attribution, moment: int) -> Int64s:
    """The moments up to `moment` at which a step of the program starts, ascending.

    If the phases show fewer than three, a step starts wherever the script's outermost loop begins anew.
    """
    starts = step_starts(attribution.phases)
    starts = starts[starts <= moment]
    if len(starts) >= _LEAST_STARTS:
        return starts
    loop = np.array(_loop_starts(attribution, moment), dtype=np.int64)
    return loop if len(loop) >= _LEAST_STARTS else starts


_Path = tuple[PythonCall, ...]


def _loop_starts(attribution: Attribution, moment: int) -> list[int]:
    """The moments at which the outermost loop of the script returns to an earlier line."""
    replayed, sites = attribution.replayed, attribution.call_sites
    paths = [
        () if site.stack.phase is Phase.BUILD or not site.stack.calls else site.stack.script_calls
        for site in sites.sites
    ]
    blocks = np.flatnonzero((replayed.allocated_by >= 0) & (replayed.allocated_by < moment))[-_MOST_EVENTS:]
    changes = np.flatnonzero(np.diff(sites.site_of[blocks], prepend=-1))
    events = replayed.allocated_by[blocks][changes].tolist()
    found: dict[tuple[object, ...], list[int]] = defaultdict(list)
    last: _Path = ()
    for event, site in zip(events, sites.site_of[blocks][changes].tolist(), strict=True):
        path = paths[site]
        if path:
            for loop in _returns(last, path):
                found[loop].append(event)
            last = path
    passes = attribution.phases.span_starts
    passes = passes[attribution.phases.codes[passes] == phase_code(Phase.FORWARD)]
    loops = [loop for loop, starts in found.items() if len(starts) >= _LEAST_STARTS and _runs_passes(starts, passes)]
    return found[min(loops, key=lambda loop: (len(loop), -len(found[loop])))] if loops else []


def _runs_passes(starts: Sequence[int], passes: Int64s) -> bool:
    """Whether most rounds of a loop begin a forward pass, unlike a loop over the rows of a batch; passes ascend."""
    rounds = np.diff(np.searchsorted(passes, starts))
    return not len(passes) or bool(2 * np.count_nonzero(rounds) >= len(rounds))


def _returns(before: Sequence[PythonCall], after: Sequence[PythonCall]) -> Iterator[tuple[object, ...]]:
    """The loop that two successive calls show: the same function, called from the same lines, at an earlier line."""
    for depth, (left, right) in enumerate(zip(before, after, strict=False)):
        if left == right:
            continue
        if (left.file, left.function) == (right.file, right.function) and right.line < left.line:
            yield (*after[:depth], right.file, right.function)
        return
