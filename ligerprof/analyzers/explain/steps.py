"""Split a recording into training steps: where they start, by phases or by the script's loop, and each one's peaks."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ligerprof.analyzers.attribution.blocks import Attribution
from ligerprof.analyzers.attribution.phases import EventPhases, phase_code
from ligerprof.analyzers.attribution.stacks import PythonCall
from ligerprof.roles import PASSES, STEP_PHASES, Phase
from ligerprof.serialization import to_json
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.trace import Int64s


@dataclass(frozen=True, kw_only=True, slots=True)
class PhasePeaks:
    """The highest allocated bytes in each phase of one training step.

    Attributes:
        step: its number in the stamps, or without stamps, counted from 1.
        phases: only phases that moved memory.
    """

    step: int
    phases: Mapping[Phase, int]

    def to_json(self) -> dict[str, Any]:
        """An entry of `steps` in the JSON."""
        return {"step": self.step, **to_json(self.phases)}


def step_peaks(phases: EventPhases, replayed: Replay) -> tuple[PhasePeaks, ...]:
    """The highest allocated bytes in each phase of each step."""
    starts, stops = _spans(phases)
    if not len(starts):
        return ()
    within = np.maximum.reduceat(replayed.allocated_bytes[:-1], starts)
    highest = np.maximum(within, replayed.allocated_bytes[stops])
    # by phase and step: a recording can have a step for each event, and a dict for each takes most of the memory
    peaks: dict[Phase, dict[int, int]] = {phase: {} for phase in STEP_PHASES}
    steps = phases.steps[starts] if phases.stamped else np.searchsorted(step_starts(phases), starts, "right")
    for start, size_bytes, number in zip(starts.tolist(), highest.tolist(), steps.tolist(), strict=True):
        phase = phases.shown_at(start)
        if phase in peaks and number:
            peaks[phase][number] = max(size_bytes, peaks[phase].get(number, 0))
    in_optimizer = peaks[Phase.OPTIMIZER]
    for number, size_bytes in _optimizer_starts(phases, replayed):
        in_optimizer[number] = max(size_bytes, in_optimizer.get(number, 0))
    return tuple(
        PhasePeaks(step=number, phases={phase: of[number] for phase, of in peaks.items() if number in of})
        for number in sorted(set().union(*peaks.values()))
    )


def _optimizer_starts(phases: EventPhases, replayed: Replay) -> Iterator[tuple[int, int]]:
    """Step and allocated bytes at the start of each optimizer step; a fused optimizer may move no memory."""
    starts = step_starts(phases)
    for moment in phases.optimizer_starts.tolist():
        stamped = int(phases.steps[moment - 1]) if moment else 0
        number = stamped if phases.stamped else int(np.searchsorted(starts, moment, "right"))
        if number:
            yield number, int(replayed.allocated_bytes[moment])


def step_starts(phases: EventPhases) -> Int64s:
    """The moment before each step's first event.

    Stamps number the steps. Without them, a step starts with a forward pass: the first one after an
    optimizer step if torch annotated those, else the first one after a backward pass. Without backward
    passes, each forward pass that does not follow another directly starts a step.
    """
    if phases.stamped:
        return np.flatnonzero(np.diff(phases.steps, prepend=0) > 0).astype(np.int64)
    begins, _ = _spans(phases)
    kinds = [phases.phase_at(begin) for begin in begins.tolist()]
    forward: Int64s = begins[np.array([kind is Phase.FORWARD for kind in kinds], dtype=bool)]
    ends = phases.optimizer_starts if len(phases.optimizer_starts) else np.flatnonzero(phases.are_in(Phase.BACKWARD))
    if len(ends):
        first: Int64s = forward[np.diff(np.searchsorted(ends, forward, "right"), prepend=-1) > 0]
        return first
    before = [None, *kinds]
    chosen = [kind is Phase.FORWARD and last not in PASSES for kind, last in zip(kinds, before, strict=False)]
    apart: Int64s = begins[np.array(chosen, dtype=bool)]
    return apart


def _spans(phases: EventPhases) -> tuple[Int64s, Int64s]:
    """First event of each span of one phase, and the event after its last."""
    spans = phases.spans
    if not len(spans):
        return spans, spans
    starts = phases.span_starts
    return starts, np.append(starts[1:], len(spans))


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
