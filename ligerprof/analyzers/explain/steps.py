"""Split a recording into training steps: each one's highest moments, and what they leave behind."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from ligerprof.analyzers.attribution.blocks import Owner
from ligerprof.analyzers.attribution.phases import Timeline
from ligerprof.analyzers.explain.parts import Growth, StepPeaks
from ligerprof.roles import STEP_PHASES, Phase, Role
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.trace import Int64s

# the first step leaves the optimizer's states behind, and the second may still fill caches
_LEAST_STEPS = 4


def step_peaks(timeline: Timeline, replayed: Replay) -> tuple[StepPeaks, ...]:
    """The highest allocated bytes in each phase of each step."""
    starts, stops = _runs(timeline)
    if not len(starts):
        return ()
    within = np.maximum.reduceat(replayed.allocated_bytes[:-1], starts)
    highest = np.maximum(within, replayed.allocated_bytes[stops])
    peaks: dict[int, dict[Phase, int]] = defaultdict(dict)
    step, before = 0, None
    for start, size_bytes in zip(starts.tolist(), highest.tolist(), strict=True):
        phase = timeline.phase_at(start)
        if phase is Phase.FORWARD and before not in (Phase.FORWARD, Phase.BACKWARD):
            step += 1
        number = int(timeline.steps[start]) if timeline.stamped else step
        if phase in STEP_PHASES and number:
            peaks[number][phase] = max(size_bytes, peaks[number].get(phase, 0))
        before = phase
    for number, size_bytes in _quiet_optimizer_steps(timeline, replayed):
        peaks[number][Phase.OPTIMIZER] = max(size_bytes, peaks[number].get(Phase.OPTIMIZER, 0))
    return tuple(StepPeaks(step=number, phases=_in_order(phases)) for number, phases in sorted(peaks.items()))


def _quiet_optimizer_steps(timeline: Timeline, replayed: Replay) -> Iterator[tuple[int, int]]:
    """Step and allocated bytes where an optimizer step began: a fused one's may move no memory."""
    begins = step_begins(timeline)
    for moment in timeline.optimizer_moments.tolist():
        stamped = int(timeline.steps[moment - 1]) if moment else 0
        number = stamped if timeline.stamped else int(np.searchsorted(begins, moment, "right"))
        if number:
            yield number, int(replayed.allocated_bytes[moment])


def growth(timeline: Timeline, replayed: Replay, owners: Sequence[Owner]) -> Growth | None:
    """What more stands before each forward pass than before the one before; None where steps give all back.

    Args:
        owners: of the blocks at the peak, among which the one to name is looked for.
    """
    ends = step_begins(timeline)
    if len(ends) < _LEAST_STEPS:
        return None
    rises = np.diff(replayed.allocated_bytes[ends])[1:]
    if int(rises.min()) <= 0:
        return None
    first, last = int(ends[1]), int(ends[-1])
    made, freed = replayed.allocated_by, replayed.freed_by
    stays = (first <= made) & (made < last) & ((freed < 0) | (freed >= last))
    stayed: dict[tuple[Role, str], int] = defaultdict(int)
    for owner in owners:
        if stays[owner.block]:
            stayed[owner.role, " ".join(filter(None, (owner.module, owner.frame)))] += owner.requested_bytes
    if not stayed:
        return None
    role, who = max(stayed, key=lambda key: stayed[key])
    return Growth(per_step_bytes=int(rises.min()), steps=len(rises), role=role, who=who)


def _runs(timeline: Timeline) -> tuple[Int64s, Int64s]:
    """First event of each run of equal phase, and the one after its last."""
    runs = timeline.runs
    if not len(runs):
        return runs, runs
    starts = np.flatnonzero(np.append(True, np.diff(runs) != 0)).astype(np.int64)
    return starts, np.append(starts[1:], len(runs))


def step_begins(timeline: Timeline) -> Int64s:
    """The moments before each forward pass that follows no pass of its own step."""
    starts, _ = _runs(timeline)
    phases = [timeline.phase_at(start) for start in starts.tolist()]
    passes = (Phase.FORWARD, Phase.BACKWARD)
    chosen = [
        start
        for start, phase, before in zip(starts.tolist(), phases, [None, *phases], strict=False)
        if phase is Phase.FORWARD and before not in passes
    ]
    return np.array(chosen, dtype=np.int64)


def _in_order(phases: dict[Phase, int]) -> dict[Phase, int]:
    return {phase: phases[phase] for phase in STEP_PHASES if phase in phases}
