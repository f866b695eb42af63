"""Decide which phase of training each event belongs to: by stamps, else by stacks and annotations."""

import itertools
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ligerprof.analyzers.attribution import frames
from ligerprof.analyzers.attribution.stacks import CallSites
from ligerprof.roles import INFERENCE_PHASES, Phase
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.stamp import Stamp
from ligerprof.snapshots.trace import DeviceTrace, Flags, Int64s

_PHASES = tuple(Phase)
_CODES = {phase: code for code, phase in enumerate(_PHASES)}
_UNKNOWN = -1
_STEP_LIMIT = 2**31
_TIME_LIMIT_US = 2**62
GENERATE = re.compile(frames.GENERATION, re.MULTILINE)
_STEP_ANNOTATION, _ZERO_ANNOTATION = "Optimizer.step#", "Optimizer.zero_grad#"


class _Range(NamedTuple):
    """First event and end of a call that torch annotates, which may hold no event, and whether it returned."""

    phase: Phase
    start: int
    stop: int
    ended: bool


def phase_code(phase: Phase | None) -> int:
    """The code of a phase in columns, -1 for an unknown one."""
    return _UNKNOWN if phase is None else _CODES[phase]


def phase_of_code(code: int) -> Phase | None:
    """The phase that has this code."""
    return None if code == _UNKNOWN else _PHASES[code]


def are_codes_of(codes: Int64s, *phases: Phase | None) -> Flags:
    """Whether each code is that of one of some phases."""
    # the last entry is that of an unknown phase
    chosen = np.zeros(len(_PHASES) + 1, dtype=bool)
    chosen[[phase_code(phase) for phase in phases]] = True
    return chosen[codes]


@dataclass(frozen=True, kw_only=True, slots=True)
class EventPhases:
    """The phase of each event, and the spans of consecutive events in one phase of one step.

    Attributes:
        codes: `phase_code` of each event, as the rules for roles need them: a pass without backward is forward.
        shown: `phase_code` of each event, as reports name it.
        spans: number of the span of each event, ascending.
        steps: training step of each event, 0 without stamps.
        stamped: whether phases and steps come from stamps.
        last_between_steps: the last event in or after an optimizer step that a forward pass follows, -1 if none.
        last_optimizer_end: the first event after the last optimizer step that torch noted to have ended, -1 if none.
        optimizer_starts: moments at which annotated optimizer steps began, even if they moved no memory.
        zero_grad_starts: the same of annotated calls of `zero_grad()`.
        stamps: the distinct stamps; None for events without one.
        stamp_of: index into `stamps` of each event.
    """

    codes: Int64s
    shown: Int64s
    spans: Int64s
    steps: Int64s
    stamped: bool
    last_between_steps: int
    last_optimizer_end: int
    optimizer_starts: Int64s
    zero_grad_starts: Int64s
    stamps: Sequence[Stamp | None]
    stamp_of: Int64s

    def phase_at(self, event: int) -> Phase | None:
        """The phase of an event; None before the recording or if unknown."""
        return phase_of_code(int(self.codes[event]) if event >= 0 else _UNKNOWN)

    def shown_at(self, event: int) -> Phase | None:
        """The phase of an event in reports; None before the recording or if unknown."""
        return phase_of_code(int(self.shown[event]) if event >= 0 else _UNKNOWN)

    def step_at(self, event: int) -> int | None:
        """The stamped training step of an event, 0 before the first; None without stamps or before the recording."""
        return int(self.steps[event]) if self.stamped and event >= 0 else None

    def codes_of(self, events: Int64s) -> Int64s:
        """Phase codes of several events; -1 before the recording or if unknown."""
        return _at(self.codes, events)

    def shown_of(self, events: Int64s) -> Int64s:
        """Phase codes of several events in reports; -1 before the recording or if unknown."""
        return _at(self.shown, events)

    def are_in(self, phase: Phase) -> Flags:
        """Whether each event is in a phase."""
        return self.codes == _CODES[phase]

    def spans_of(self, events: Int64s) -> Int64s:
        """Spans of several events, -1 before the recording."""
        return _at(self.spans, events)

    def feeds_forward(self, allocated: Int64s, freed: Int64s) -> Flags:
        """Whether blocks are alive when a forward pass runs after their allocation; `freed` is -1 for kept blocks."""
        forward = np.append(np.flatnonzero(self.codes == _CODES[Phase.FORWARD]), len(self.codes))
        following = forward[np.searchsorted(forward, allocated)]
        return (following < len(self.codes)) & ((freed < 0) | (freed > following))

    def follows_forward(self, events: Int64s) -> Flags:
        """Whether the last phase up to each event, apart from `outside`, was forward."""
        passes = _filled_forward(np.where(self.codes == _CODES[Phase.OUTSIDE], _UNKNOWN, self.codes))
        return _at(passes, events) == _CODES[Phase.FORWARD]

    def moments_of(self, phase: Phase, step: int | None = None) -> list[Int64s]:
        """The moments around each event of a phase, and for the optimizer its starts; `step` selects a stamped step."""
        chosen = self.shown == _CODES[phase]
        if step is not None:
            chosen &= self.steps == step
        events = np.flatnonzero(chosen)
        if phase is not Phase.OPTIMIZER:
            return [events, events + 1]
        starts = self.optimizer_starts
        return [events, events + 1, starts if step is None else starts[np.append(0, self.steps)[starts] == step]]

    @property
    def span_starts(self) -> Int64s:
        """The first event of each span."""
        return np.searchsorted(self.spans, np.arange(self.last_span + 1))[: len(self.spans)]

    @property
    def span_stops(self) -> Int64s:
        """The event after the last one of each span."""
        starts = self.span_starts
        return np.append(starts[1:], len(self.spans))[: len(starts)]

    @property
    def last_span(self) -> int:
        """The span in which the recording ends."""
        return int(self.spans[-1]) if len(self.spans) else 0


def find_phases(replayed: Replay, call_sites: CallSites, annotations: Sequence[Mapping[str, Any]]) -> EventPhases:
    """The phases of a device's events; `annotations` are the snapshot's `external_annotations`."""
    ranges = list(_annotated_ranges(replayed, annotations))
    stamp_of, stamps = _read_stamps(replayed.trace)
    stamped = _from_stamps(stamp_of, stamps)
    if stamped is not None:
        shown, steps = stamped
        codes: Int64s = np.where(are_codes_of(shown, *INFERENCE_PHASES), _CODES[Phase.FORWARD], shown)
        shown = _with_use_of_outputs(shown, replayed)
    else:
        codes = _join_loss(_from_stacks(replayed, call_sites, ranges), replayed, call_sites)
        shown = _with_generation(codes, replayed, call_sites)
        steps = np.zeros(len(codes), dtype=np.int64)
    forward = np.flatnonzero(codes == _CODES[Phase.FORWARD])
    between = np.flatnonzero((codes == _CODES[Phase.OPTIMIZER]) | (codes == _CODES[Phase.OUTSIDE]))
    followed = between[between < forward[-1]] if len(forward) else between[:0]
    return EventPhases(
        codes=codes,
        shown=shown,
        spans=_spans(codes, steps),
        steps=steps,
        stamped=stamped is not None,
        last_between_steps=int(followed[-1]) if len(followed) else _UNKNOWN,
        last_optimizer_end=max(
            (each.stop for each in ranges if each.ended and each.phase is Phase.OPTIMIZER), default=_UNKNOWN
        ),
        optimizer_starts=_starts(ranges, Phase.OPTIMIZER),
        zero_grad_starts=_starts(ranges, Phase.OUTSIDE),
        stamps=stamps,
        stamp_of=stamp_of,
    )


def _at(values: Int64s, events: Int64s) -> Int64s:
    """The values of some events, -1 for those before the recording."""
    if not len(values):
        return np.full(len(events), _UNKNOWN, dtype=np.int64)
    found = values[events]
    found[events < 0] = _UNKNOWN
    return found


def _read_stamps(trace: DeviceTrace) -> tuple[Int64s, list[Stamp | None]]:
    """Index of each event's stamp, and the stamps; each text is parsed once."""
    text_of, texts = trace.objects("user_metadata")
    return text_of, list(map(Stamp.parse, texts))


def _from_stamps(stamp_of: Int64s, stamps: Sequence[Stamp | None]) -> tuple[Int64s, Int64s] | None:
    """Phases and steps from stamps, extended over the events without one; None if no event has a stamp."""
    pairs = [
        (_CODES[stamp.phase], stamp.step) if stamp is not None and stamp.step < _STEP_LIMIT else (_UNKNOWN, _UNKNOWN)
        for stamp in stamps
    ]
    if all(code == _UNKNOWN for code, _ in pairs):
        return None
    columns = np.array(pairs, dtype=np.int64)[stamp_of]
    return _filled_forward(columns[:, 0]), np.maximum(_filled_forward(columns[:, 1]), 0)


def _from_stacks(replayed: Replay, call_sites: CallSites, ranges: Sequence[_Range]) -> Int64s:
    """The phases of allocations, extended over the events that follow them.

    Args:
        ranges: annotated ranges of events. An annotation wins over stacks except for a closure that the
            optimizer's step calls, which runs the model forward and backward.
    """
    stacks = [site.stack for site in call_sites.sites]
    # if only Python stacks were recorded, autograd's threads have none
    silent = Phase.BACKWARD if any(stack.calls for stack in stacks) else None
    phases = [stack.phase if stack.calls or stack.native else silent for stack in stacks]
    by_site = np.array([phase_code(phase) for phase in phases], dtype=np.int64)
    codes = np.full(len(replayed.trace), _UNKNOWN, dtype=np.int64)
    within = replayed.allocated_by >= 0
    codes[replayed.allocated_by[within]] = by_site[call_sites.site_of[within]]
    filled = _filled_forward(codes)
    passes = (_CODES[Phase.FORWARD], _CODES[Phase.BACKWARD])
    for phase, start, stop, _ in ranges:
        within_range = codes[start:stop].copy()
        within_range[~np.isin(within_range, (_UNKNOWN, *passes))] = _CODES[phase]
        if len(within_range) and within_range[0] == _UNKNOWN:
            within_range[0] = _CODES[phase]
        filled[start:stop] = _filled_forward(within_range)
    return filled


def _with_generation(codes: Int64s, replayed: Replay, call_sites: CallSites) -> Int64s:
    """The phases with forward passes inside transformers' `generate`, and what follows their allocations, as such."""
    allocated = replayed.allocated_by >= 0
    generates = np.full(len(codes), _UNKNOWN, dtype=np.int64)
    generates[replayed.allocated_by[allocated]] = call_sites.matching(GENERATE)[allocated]
    within = (_filled_forward(generates) == 1) & (codes == _CODES[Phase.FORWARD])
    return np.where(within, _CODES[Phase.GENERATION], codes)


# of the output's size: what a script makes of it, and not the next batch
_MUCH_SMALLER = 0.2


def _with_use_of_outputs(shown: Int64s, replayed: Replay) -> Int64s:
    """The phases with what a program computes from the outputs of a model without gradients: it belongs to the model.

    A recorder's stamps end with the model's call. The phase goes on while the largest block lives that the call leaves,
    such as the logits, and then while one lives that the script made meanwhile and that is not much smaller, such as
    their fp32 copy. Blocks that live into the next phase are something else, such as a library's workspace.
    """
    bounds = np.flatnonzero(np.diff(shown, prepend=_UNKNOWN - 1))
    stops = np.append(bounds[1:], len(shown))
    infers = are_codes_of(shown[bounds], *INFERENCE_PHASES)
    follows = np.append(shown[bounds][1:] == _CODES[Phase.OUTSIDE], False)
    blocks = np.flatnonzero(replayed.allocated_by >= 0)
    allocated, sizes = replayed.allocated_by[blocks], replayed.requested_bytes[blocks]
    freed = np.where(replayed.freed_by[blocks] < 0, len(shown), replayed.freed_by[blocks])
    run = np.searchsorted(bounds, allocated, "right") - 1
    next_stops = np.append(stops[1:], len(shown))[run]
    # the recording may end, or memory run out, while outputs live
    is_used = (freed < next_stops) | (next_stops == len(shown))
    left = np.flatnonzero((infers & follows)[run] & (freed >= stops[run]) & is_used)
    left = left[np.lexsort((sizes[left], run[left]))]
    largest = left[np.append(run[left][1:] != run[left][:-1], True)[: len(left)]]
    extended = shown.copy()
    for block in largest.tolist():
        start, stop = int(stops[run[block]]), int(stops[run[block] + 1])
        end, known = int(freed[block]), -1
        while known < end < stop:
            known = end
            made = slice(*np.searchsorted(allocated, (start, end)))
            is_derived = (sizes[made] >= _MUCH_SMALLER * sizes[block]) & ((freed[made] < stop) | (stop == len(shown)))
            end = int(np.max(freed[made], where=is_derived, initial=end))
        extended[start : min(end + 1, stop)] = shown[bounds[run[block]]]
    return extended


def _annotated_ranges(replayed: Replay, annotations: Sequence[Mapping[str, Any]]) -> Iterator[_Range]:
    """The ranges that torch's optimizers annotate."""
    times_of_ranges = list(_optimizer_ranges(annotations, replayed.device))
    if not times_of_ranges or not len(replayed.trace):
        return
    # the clocks of several threads may disagree slightly, and searchsorted needs ascending times
    recorded = replayed.trace.numbers("time_us")
    times = np.maximum.accumulate(np.where(recorded < _TIME_LIMIT_US, recorded, 0))
    for phase, start, end in times_of_ranges:
        # annotations outlive the events that a full ring buffer drops
        if end >= times[0]:
            bounds = int(np.searchsorted(times, start, "left")), int(np.searchsorted(times, end, "right"))
            yield _Range(phase, *bounds, end < _TIME_LIMIT_US)


def _optimizer_ranges(annotations: Sequence[Mapping[str, Any]], device: int) -> Iterator[tuple[Phase, int, int]]:
    """Start and end times of optimizer.step() and zero_grad() calls, in microseconds."""
    starts: dict[str, int] = {}
    for note in annotations:
        name, stage, time = note.get("name"), note.get("stage"), note.get("time_us")
        time = time if type(time) is int and 0 <= time < _TIME_LIMIT_US else 0
        if not isinstance(name, str) or not name.startswith((_STEP_ANNOTATION, _ZERO_ANNOTATION)):
            continue
        if note.get("device", device) != device:
            continue
        if stage == "START":
            starts[name] = time
        elif stage == "END" and name in starts:
            yield _annotated_phase(name), starts.pop(name), time
    # memory ran out within
    for name, time in starts.items():
        yield _annotated_phase(name), time, _TIME_LIMIT_US


def _starts(ranges: Sequence[_Range], chosen: Phase) -> Int64s:
    return np.array([each.start for each in ranges if each.phase is chosen], dtype=np.int64)


def _annotated_phase(name: str) -> Phase:
    return Phase.OPTIMIZER if name.startswith(_STEP_ANNOTATION) else Phase.OUTSIDE


def _filled_forward(codes: Int64s) -> Int64s:
    """Replace each unknown entry by the last known one before it."""
    known = np.flatnonzero(codes != _UNKNOWN)
    if not len(known) or len(known) == len(codes):
        return codes.copy()
    lengths = np.diff(known, append=len(codes))
    return np.append(codes[: known[0]], np.repeat(codes[known], lengths))


def _join_loss(codes: Int64s, replayed: Replay, call_sites: CallSites) -> Int64s:
    """Count events between forward and backward as forward: scripts compute the loss there.

    Several forward passes may precede a backward pass, such as those of a policy and a reference model. The first
    one that counts allocated a block that backward frees: a tensor saved for backward. What ran before it, such as
    the generation of samples, is not part of the loss. The lines of a loss are then recognized after any forward
    pass: after one of a reference model, in evaluation, and where the recording ends before backward.
    """
    outside, forward, backward = (_CODES[phase] for phase in (Phase.OUTSIDE, Phase.FORWARD, Phase.BACKWARD))
    joined = codes.copy()
    saved_at, freed_at = _saved_for_backward(codes, replayed)
    bounds = [*np.flatnonzero(np.diff(codes, prepend=_UNKNOWN - 1)).tolist(), len(codes)]
    passes: list[int] = []
    follows_pass = np.zeros(len(codes), dtype=bool)
    for start, stop in itertools.pairwise(bounds):
        if codes[start] == backward and passes:
            saved = saved_at[slice(*np.searchsorted(freed_at, (start, stop)))]
            first = saved[saved >= passes[0]].min(initial=start)
            joined[passes[bisect_right(passes, first) - 1] : start] = forward
        if codes[start] == forward:
            passes.append(start)
        elif codes[start] != outside:
            passes = []
        elif passes:
            follows_pass[start:stop] = True
    within = replayed.allocated_by >= 0
    allocated, sites = replayed.allocated_by[within], _innermost_calls(call_sites)[call_sites.site_of[within]]
    in_loss = (codes[allocated] == outside) & (joined[allocated] == forward)
    before_pass = (codes[allocated] == outside) & ~follows_pass[allocated]
    of_loss = np.zeros(len(call_sites.sites), dtype=bool)
    of_loss[sites[in_loss]] = True
    of_loss[sites[before_pass]] = False
    ends = np.zeros(len(codes), dtype=bool)
    ends[allocated[of_loss[sites]]] = True
    # the rest of such a run may load the next batch
    until_end = np.logical_or.accumulate
    for start, stop in itertools.pairwise(bounds):
        if follows_pass[start]:
            joined[start:stop][until_end(ends[start:stop][::-1])[::-1]] = forward
    return joined


def _innermost_calls(call_sites: CallSites) -> Int64s:
    """A number for the innermost Python call of each call site."""
    numbers: dict[object, int] = {}
    calls = (site.stack.calls[:1] for site in call_sites.sites)
    return np.array([numbers.setdefault(call, len(numbers)) for call in calls], dtype=np.int64)


def _saved_for_backward(codes: Int64s, replayed: Replay) -> tuple[Int64s, Int64s]:
    """Allocation and free events of the blocks that forward allocated and backward freed, by time of the free."""
    blocks = np.flatnonzero((replayed.allocated_by >= 0) & (replayed.freed_by >= 0))
    allocated, freed = replayed.allocated_by[blocks], replayed.freed_by[blocks]
    saved = (codes[allocated] == _CODES[Phase.FORWARD]) & (codes[freed] == _CODES[Phase.BACKWARD])
    order = np.argsort(freed[saved])
    return allocated[saved][order], freed[saved][order]


def _spans(codes: Int64s, steps: Int64s) -> Int64s:
    if not len(codes):
        return codes
    # hooks that step the optimizer during backward do not end it
    backward, optimizer = _CODES[Phase.BACKWARD], _CODES[Phase.OPTIMIZER]
    bounds = np.flatnonzero(np.diff(codes, prepend=_UNKNOWN - 1))
    runs = codes[bounds]
    hooked = np.zeros(len(runs), dtype=bool)
    hooked[1:-1] = (runs[1:-1] == optimizer) & (runs[:-2] == backward) & (runs[2:] == backward)
    codes = np.repeat(np.where(hooked, backward, runs), np.diff(np.append(bounds, len(codes))))
    changes = (np.diff(codes) != 0) | (np.diff(steps) != 0)
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(changes, dtype=np.int64)])


class DeviceBlocks:
    """The blocks of a replayed device with their call sites and phases, from which features are found.

    Attributes:
        codes: `phase_code` of each block; by default the phase of the event that allocated it.
        spans: the span in which each block was allocated, -1 before the recording.
    """

    def __init__(
        self, replayed: Replay, call_sites: CallSites, phases: EventPhases, codes: Int64s | None = None
    ) -> None:
        self.replayed, self.call_sites, self.phases = replayed, call_sites, phases
        self.codes = phases.codes_of(replayed.allocated_by) if codes is None else codes
        self.spans = phases.spans_of(replayed.allocated_by)

    def in_phase(self, *phases: Phase | None) -> Flags:
        """Whether each block was allocated in one of some phases."""
        return are_codes_of(self.codes, *phases)

    def outlive_span(self, blocks: Int64s) -> Flags:
        """Whether blocks are kept, or freed in a later span than the one that allocated them."""
        freed = self.replayed.freed_by[blocks]
        return (freed < 0) | (self.phases.spans_of(freed) > self.spans[blocks])


class BlockFinder:
    """The base of what finds some feature of a device's blocks."""

    def __init__(self, blocks: DeviceBlocks) -> None:
        self._device = blocks
        self._replayed, self._call_sites, self._phases = blocks.replayed, blocks.call_sites, blocks.phases
        self._codes, self._spans = blocks.codes, blocks.spans
        self._sizes = blocks.replayed.requested_bytes

    def _mask(self, blocks: Int64s) -> Flags:
        mask = np.zeros(len(self._sizes), dtype=bool)
        mask[blocks] = True
        return mask
