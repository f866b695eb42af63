"""Split a recording into training steps: the peaks of each step, and the memory that steps leave behind."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ligerprof.analyzers.attribution.blocks import Owner
from ligerprof.analyzers.attribution.phases import EventPhases
from ligerprof.roles import STEP_PHASES, Phase, Role
from ligerprof.serialization import to_json
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.trace import Int64s

# the first step leaves the optimizer states behind, and the second may still fill caches
_LEAST_STEPS = 4
_PASSES = (Phase.FORWARD, Phase.BACKWARD)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """Memory that each step leaves behind.

    Attributes:
        per_step_bytes: the smallest increase from the end of one step to the end of the next.
        steps: number of consecutive steps that grew.
        role: the role of the largest group of blocks left behind.
        who: module and frame of that group.
    """

    per_step_bytes: int
    steps: int
    role: Role
    who: str


def step_peaks(phases: EventPhases, replayed: Replay) -> tuple[PhasePeaks, ...]:
    """The highest allocated bytes in each phase of each step."""
    starts, stops = _spans(phases)
    if not len(starts):
        return ()
    within = np.maximum.reduceat(replayed.allocated_bytes[:-1], starts)
    highest = np.maximum(within, replayed.allocated_bytes[stops])
    peaks: dict[int, dict[Phase, int]] = defaultdict(dict)
    step, before = 0, None
    for start, size_bytes in zip(starts.tolist(), highest.tolist(), strict=True):
        phase = phases.phase_at(start)
        if phase is Phase.FORWARD and before not in _PASSES:
            step += 1
        number = int(phases.steps[start]) if phases.stamped else step
        if phase in STEP_PHASES and number:
            peaks[number][phase] = max(size_bytes, peaks[number].get(phase, 0))
        before = phase
    for number, size_bytes in _optimizer_starts(phases, replayed):
        peaks[number][Phase.OPTIMIZER] = max(size_bytes, peaks[number].get(Phase.OPTIMIZER, 0))
    order = STEP_PHASES.index
    return tuple(
        PhasePeaks(step=number, phases={phase: peaks[number][phase] for phase in sorted(peaks[number], key=order)})
        for number in sorted(peaks)
    )


def _optimizer_starts(phases: EventPhases, replayed: Replay) -> Iterator[tuple[int, int]]:
    """Step and allocated bytes at the start of each optimizer step; a fused optimizer may move no memory."""
    starts = step_starts(phases)
    for moment in phases.optimizer_starts.tolist():
        stamped = int(phases.steps[moment - 1]) if moment else 0
        number = stamped if phases.stamped else int(np.searchsorted(starts, moment, "right"))
        if number:
            yield number, int(replayed.allocated_bytes[moment])


def find_growth(phases: EventPhases, replayed: Replay, owners: Sequence[Owner]) -> Growth | None:
    """Compare the memory at the start of successive forward passes; None unless it grows in each step.

    Args:
        owners: owners of the blocks at the peak, which are searched for the largest group.
    """
    starts = step_starts(phases)
    if len(starts) < _LEAST_STEPS:
        return None
    rises = np.diff(replayed.allocated_bytes[starts])[1:]
    if int(rises.min()) <= 0:
        return None
    first, last = int(starts[1]), int(starts[-1])
    allocated, freed = replayed.allocated_by, replayed.freed_by
    stays = (first <= allocated) & (allocated < last) & ((freed < 0) | (freed >= last))
    stayed: dict[tuple[Role, str], int] = defaultdict(int)
    for owner in owners:
        if stays[owner.block]:
            stayed[owner.role, " ".join(filter(None, (owner.module, owner.frame)))] += owner.requested_bytes
    if not stayed:
        return None
    role, who = max(stayed, key=lambda key: stayed[key])
    return Growth(per_step_bytes=int(rises.min()), steps=len(rises), role=role, who=who)


def step_starts(phases: EventPhases) -> Int64s:
    """The moment before each step's first forward pass."""
    starts, _ = _spans(phases)
    chosen, before = [], None
    for start in starts.tolist():
        phase = phases.phase_at(start)
        if phase is Phase.FORWARD and before not in _PASSES:
            chosen.append(start)
        before = phase
    return np.array(chosen, dtype=np.int64)


def _spans(phases: EventPhases) -> tuple[Int64s, Int64s]:
    """First event of each span of one phase, and the event after its last."""
    spans = phases.spans
    if not len(spans):
        return spans, spans
    starts = np.flatnonzero(np.append(True, np.diff(spans) != 0)).astype(np.int64)
    return starts, np.append(starts[1:], len(spans))
