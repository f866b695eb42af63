"""Decide which phase of training each event belongs to: by our stamps, or else by stacks and annotations."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ligerprof.analyzers.attribution.call_sites import Requests
from ligerprof.roles import Phase
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.stamp import Stamp
from ligerprof.snapshots.trace import Trace

_PHASES = tuple(Phase)
_CODES = {phase: code for code, phase in enumerate(_PHASES)}
_UNKNOWN = -1
_STEP_LIMIT = 2**31
_TIME_LIMIT_US = 2**62
_STEP_ANNOTATION, _ZERO_ANNOTATION = "Optimizer.step#", "Optimizer.zero_grad#"

Codes = npt.NDArray[np.int64]


def phase_code(phase: Phase | None) -> int:
    """The index that stands for a phase in columns, -1 for an unknown one."""
    return _UNKNOWN if phase is None else _CODES[phase]


def phase_of_code(code: int) -> Phase | None:
    """The phase that an index stands for."""
    return None if code == _UNKNOWN else _PHASES[code]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """The phase of every event, and the runs of equal phase that they form.

    Attributes:
        codes: index into the phases, -1 where unknown.
        runs: number of the run that each event is in, rising.
        steps: training step of each event where stamps say so, else 0.
        stamped: whether our own stamps said it.
        last_pause: the last event of an optimizer step, or outside of steps, that a forward pass follows; -1 for none.
        optimizer_moments: where optimizer steps began as annotations say, those that moved no memory too.
    """

    codes: Codes
    runs: Codes
    steps: Codes
    stamped: bool
    last_pause: int
    optimizer_moments: Codes

    def phase_at(self, event: int) -> Phase | None:
        """The phase of an event; None before the recording or where it is unknown."""
        return phase_of_code(int(self.codes[event]) if event >= 0 else _UNKNOWN)

    def run_at(self, event: int) -> int:
        """The run of an event, -1 before the recording."""
        return int(self.runs[event]) if event >= 0 else _UNKNOWN

    def phases_of(self, events: Codes) -> Codes:
        """Phases of many events at once, as indices; -1 before the recording or where unknown."""
        return np.append(self.codes, _UNKNOWN)[events]

    def runs_of(self, events: Codes) -> Codes:
        """Runs of many events at once, -1 before the recording."""
        return np.append(self.runs, _UNKNOWN)[events]

    def events_of(self, phase: Phase, step: int | None = None) -> Codes:
        """Indices of the events of a phase, of one stamped step or of all."""
        chosen = self.codes == _CODES[phase]
        if step is not None:
            chosen &= self.steps == step
        return np.flatnonzero(chosen).astype(np.int64)

    def optimizer_begins(self, step: int | None = None) -> Codes:
        """Moments at which annotated optimizer steps began, those of one stamped step or all."""
        begins = self.optimizer_moments
        if step is None:
            return begins
        chosen: Codes = begins[np.append(0, self.steps)[begins] == step]
        return chosen

    @property
    def last_run(self) -> int:
        """Number of the run that the recording ends in."""
        return int(self.runs[-1]) if len(self.runs) else 0


def make_timeline(replayed: Replay, requests: Requests, annotations: Sequence[Mapping[str, Any]]) -> Timeline:
    """Work out the phases of a replayed device's events."""
    ranges = list(_annotated_ranges(replayed, annotations))
    stamped = _from_stamps(replayed.trace)
    if stamped is not None:
        codes, steps = stamped
    else:
        codes = _from_stacks(replayed, requests)
        steps = np.zeros(len(codes), dtype=np.int64)
        for phase, start, stop in ranges:
            codes[start:stop] = _CODES[phase]
    forward = np.flatnonzero(codes == _CODES[Phase.FORWARD])
    pauses = np.flatnonzero((codes == _CODES[Phase.OPTIMIZER]) | (codes == _CODES[Phase.OUTSIDE]))
    followed = pauses[pauses < forward[-1]] if len(forward) else pauses[:0]
    return Timeline(
        codes=codes,
        runs=_runs(codes, steps),
        steps=steps,
        stamped=stamped is not None,
        last_pause=int(followed[-1]) if len(followed) else _UNKNOWN,
        optimizer_moments=np.array([start for phase, start, _ in ranges if phase is Phase.OPTIMIZER], dtype=np.int64),
    )


def _from_stamps(trace: Trace) -> tuple[Codes, Codes] | None:
    """Phases and steps as our stamps say, carried on over events without; None where no event has one."""
    text_of, texts = trace.objects("user_metadata")
    stamps = {text: Stamp.parse(text) for text in {text for text in texts if isinstance(text, str)}}
    known = {
        text: (_CODES[stamp.phase], stamp.step)
        for text, stamp in stamps.items()
        if stamp is not None and stamp.step < _STEP_LIMIT
    }
    if not known:
        return None
    unknown = (_UNKNOWN, _UNKNOWN)
    pairs = [known.get(text, unknown) if isinstance(text, str) else unknown for text in texts]
    columns = np.array(pairs, dtype=np.int64)[text_of]
    return _carried_on(columns[:, 0]), np.maximum(_carried_on(columns[:, 1]), 0)


def _from_stacks(replayed: Replay, requests: Requests) -> Codes:
    """The phase of allocations, carried on over what follows them."""
    stacks = [kind.stack for kind in requests.kinds]
    # with Python stacks alone, autograd's threads are those that have none
    silent = Phase.BACKWARD if any(stack.calls for stack in stacks) else None
    phases = [stack.phase if stack.calls or stack.native else silent for stack in stacks]
    by_kind = np.array([phase_code(phase) for phase in phases], dtype=np.int64)
    codes = np.full(len(replayed.trace), _UNKNOWN, dtype=np.int64)
    within = replayed.allocated_by >= 0
    if len(by_kind):
        codes[replayed.allocated_by[within]] = by_kind[requests.kind_of[within]]
    return _join_loss(_carried_on(codes))


def _annotated_ranges(replayed: Replay, annotations: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Phase, int, int]]:
    """The events between the annotations that torch's optimizers leave, also where there are none between them."""
    times_of_ranges = list(_optimizer_ranges(annotations, replayed.device))
    if not times_of_ranges or not len(replayed.trace):
        return
    # clocks of several threads may run back a little; ranges are cut out of the rising times
    stated = replayed.trace.numbers("time_us")
    times = np.maximum.accumulate(np.where(stated < _TIME_LIMIT_US, stated, 0))
    for phase, start, end in times_of_ranges:
        # annotations outlive the events that a full ring drops
        if end >= times[0]:
            yield phase, int(np.searchsorted(times, start, "left")), int(np.searchsorted(times, end, "right"))


def _optimizer_ranges(annotations: Sequence[Mapping[str, Any]], device: int) -> Iterator[tuple[Phase, int, int]]:
    """Times between which an optimizer stepped or dropped the gradients."""
    starts: dict[str, int] = {}
    for note in annotations:
        name, stage, time = note.get("name"), note.get("stage"), _microseconds(note.get("time_us"))
        if not isinstance(name, str) or not name.startswith((_STEP_ANNOTATION, _ZERO_ANNOTATION)):
            continue
        if note.get("device", device) != device:
            continue
        if stage == "START":
            starts[name] = time
        elif stage == "END" and name in starts:
            yield Phase.OPTIMIZER if name.startswith(_STEP_ANNOTATION) else Phase.OUTSIDE, starts.pop(name), time


def _microseconds(time: Any) -> int:
    return time if type(time) is int and 0 <= time < _TIME_LIMIT_US else 0


def _carried_on(codes: Codes) -> Codes:
    """Give unknown entries the last known one before them."""
    known = np.where(codes == _UNKNOWN, 0, np.arange(len(codes)))
    return codes[np.maximum.accumulate(known)] if len(codes) else codes


def _join_loss(codes: Codes) -> Codes:
    """Call what a script does itself between forward and backward forward: it is its loss."""
    outside, forward, backward = (_CODES[phase] for phase in (Phase.OUTSIDE, Phase.FORWARD, Phase.BACKWARD))
    edges = np.flatnonzero(np.diff(codes)) + 1
    bounds = [0, *edges.tolist(), len(codes)]
    for before, start, stop in zip(bounds, bounds[1:], bounds[2:], strict=False):
        follows = codes[stop] if stop < len(codes) else _UNKNOWN
        if codes[start] == outside and codes[before] == forward and follows == backward:
            codes[start:stop] = forward
    return codes


def _runs(codes: Codes, steps: Codes) -> Codes:
    if not len(codes):
        return codes
    changes = (np.diff(codes) != 0) | (np.diff(steps) != 0)
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(changes, dtype=np.int64)])
