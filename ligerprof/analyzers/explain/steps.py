"""Split a recording into training steps: the peaks of each step, and where they start."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ligerprof.analyzers.attribution.phases import EventPhases
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
