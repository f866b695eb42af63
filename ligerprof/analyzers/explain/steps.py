"""The training steps of a recording: where they start, the peaks of each, and memory that grows from step to step."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ligerprof.analyzers.attribution.blocks import Attribution
from ligerprof.analyzers.attribution.owners import Owners
from ligerprof.analyzers.attribution.phases import EventPhases, phase_code
from ligerprof.analyzers.attribution.stacks import PythonCall
from ligerprof.roles import PASSES, STEP_PHASES, Phase, Role
from ligerprof.serialization import select, to_json
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.trace import SIZE_LIMIT, Int64s


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
    starts, stops = phases.span_starts, phases.span_stops
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
        return np.flatnonzero(np.diff(phases.steps, prepend=0) > 0)
    begins = phases.span_starts
    kinds = [phases.phase_at(begin) for begin in begins.tolist()]
    forward: Int64s = begins[np.array([kind is Phase.FORWARD for kind in kinds], dtype=bool)]
    ends = phases.optimizer_starts if len(phases.optimizer_starts) else np.flatnonzero(phases.are_in(Phase.BACKWARD))
    if len(ends):
        return forward[np.diff(np.searchsorted(ends, forward, "right"), prepend=-1) > 0]
    before = [None, *kinds]
    chosen = [kind is Phase.FORWARD and last not in PASSES for kind, last in zip(kinds, before, strict=False)]
    return begins[np.array(chosen, dtype=bool)]


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


# so many steps back are compared
_MOST_STEPS = 32
# a smaller share of the allocated bytes explains nothing
_LEAST_SHARE = 0.001
_STEADY_SHARE = 0.75
_SUMMED = ("per_step_bytes", "per_step_blocks", "held_bytes", "held_blocks")


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """Blocks of one call site that each step leaves behind.

    Attributes:
        per_step_bytes: typical increase in bytes, from the start of a step to the start of the next that adds some.
        per_step_blocks: typical increase in blocks; 0 if one block is replaced by a larger one.
        steps: number of steps that added some, of the last steps.
        held_bytes: requested bytes of the call site's blocks at the moment.
        who: module and frame.
        called_from: the line of the script that led there, "" if unknown.
    """

    per_step_bytes: int
    per_step_blocks: int
    steps: int
    held_bytes: int
    held_blocks: int
    role: Role
    module: str
    frame: str
    called_from: str

    @property
    def who(self) -> str:
        """Module and frame in one text."""
        return " ".join(filter(None, (self.module, self.frame)))

    def to_json(self) -> dict[str, Any]:
        """The object `growth`, and an entry of `growth` in `oom`."""
        return select(
            self,
            *("per_step_bytes", "per_step_blocks", "steps", "held_bytes", "held_blocks"),
            *("role", "module", "frame", "called_from", "who"),
        )


class _Rises(NamedTuple):
    steps: int
    size_bytes: int
    blocks: int


def find_growth(attribution: Attribution, moment: int, owners: Owners, *, least_steps: int) -> tuple[Growth, ...]:
    """The call sites whose memory grows up to a moment, the fastest first.

    What is held is compared at the starts of steps. Memory grows if it never shrinks, rises by a
    steady number of blocks (or of bytes, if one block is replaced by larger ones), and still rose
    in the last steps; so weights, optimizer states and caches that stopped growing are left out.

    Args:
        least_steps: number of steps that must have added memory.
    """
    starts = repetitions(attribution, moment)[-_MOST_STEPS - 1 :]
    if len(starts) <= least_steps:
        return ()
    keys = _site_keys(attribution)
    chosen, group_of = np.unique(keys[owners.blocks], return_inverse=True)
    # the owners group by group, each oldest first
    order = np.argsort(group_of, kind="stable")
    bounds = np.searchsorted(group_of[order], np.arange(len(chosen) + 1)).tolist()
    sizes, counts = _held_at(attribution, moment, starts, keys, chosen)
    allocated_bytes = int(attribution.replayed.allocated_bytes[moment])
    found = []
    for number, (first, stop) in enumerate(pairwise(bounds)):
        rises = _steady_rises(sizes[number], counts[number], least_steps)
        if rises is not None and rises.steps * rises.size_bytes >= _LEAST_SHARE * allocated_bytes:
            found.append(_growth(attribution, owners.chosen(order[first:stop]), rises))
    return tuple(sorted(_merged(found), key=lambda growth: -growth.per_step_bytes))


def _merged(found: Sequence[Growth]) -> Iterator[Growth]:
    """Join call sites that differ only in calls that a report does not show."""
    alike: dict[object, list[Growth]] = defaultdict(list)
    for growth in found:
        replaced = growth.per_step_blocks == 0
        alike[growth.role, growth.who, growth.called_from, growth.steps, replaced].append(growth)
    for group in alike.values():
        sums = {name: sum(getattr(growth, name) for growth in group) for name in _SUMMED}
        yield replace(group[0], **sums)


def _site_keys(attribution: Attribution) -> Int64s:
    """A number for each block, equal for the same call site in any step; without a stack, size distinguishes them."""
    sites, requested = attribution.call_sites, attribution.replayed.requested_bytes
    is_known = np.array([site.is_known for site in sites.sites], dtype=bool)
    apart = np.where(is_known[sites.site_of], 0, requested) if len(is_known) else requested
    return sites.place_of * SIZE_LIMIT + apart


def _held_at(
    attribution: Attribution, moment: int, starts: Int64s, keys: Int64s, chosen: Int64s
) -> tuple[Int64s, Int64s]:
    """Bytes and blocks of the chosen call sites at each start: two arrays of call sites by starts."""
    replayed = attribution.replayed
    first = np.searchsorted(starts, replayed.allocated_by, "right")
    freed = np.where(replayed.freed_by < 0, moment, replayed.freed_by)
    end = np.searchsorted(starts, freed, "right")
    is_chosen = np.isin(keys, chosen)
    blocks = np.flatnonzero((first < end) & (replayed.allocated_by < moment) & is_chosen)
    number = np.searchsorted(chosen, keys[blocks])
    held = []
    for amounts in (replayed.requested_bytes[blocks], np.ones(len(blocks), dtype=np.int64)):
        changes = np.zeros((len(chosen), len(starts) + 1), dtype=np.int64)
        np.add.at(changes, (number, first[blocks]), amounts)
        np.subtract.at(changes, (number, end[blocks]), amounts)
        held.append(np.cumsum(changes, axis=1, out=changes)[:, :-1])
    return held[0], held[1]


def _steady_rises(sizes: Int64s, counts: Int64s, least_steps: int) -> _Rises | None:
    """The rises of one group; None if it shrinks, rises irregularly, or stopped rising."""
    by_bytes, by_blocks = np.diff(sizes), np.diff(counts)
    steps = np.flatnonzero(by_bytes)
    if len(steps) < least_steps or (by_bytes < 0).any():
        return None
    gaps = np.diff(steps).tolist() or [1]
    usual = _median_low(gaps)
    if len(by_bytes) - steps[-1] > usual or max(gaps) > 2 * usual or (usual > 1 and len(gaps) == 1):
        return None
    added = by_blocks[steps].tolist()
    blocks, times = Counter(added).most_common(1)[0]
    # two steps alone are evidence only if they agree
    if times < (_STEADY_SHARE * len(added) if len(added) > 2 else len(added)):
        return None
    return _Rises(steps=len(steps), size_bytes=_median_low(by_bytes[steps].tolist()), blocks=int(blocks))


def _median_low(numbers: Sequence[int]) -> int:
    """The middle number, or the lower one of two in the middle; importing `statistics` takes longer than a report."""
    return sorted(numbers)[(len(numbers) - 1) // 2]


def _growth(attribution: Attribution, owners: Owners, rises: _Rises) -> Growth:
    by_role, last = owners.bytes_by_role(), owners[-1]
    return Growth(
        per_step_bytes=rises.size_bytes,
        per_step_blocks=rises.blocks,
        steps=rises.steps,
        held_bytes=sum(by_role.values()),
        held_blocks=len(owners),
        role=max(by_role, key=by_role.__getitem__),
        module=last.module,
        frame=last.frame,
        called_from=attribution.call_sites.of(last.block).stack.script_line,
    )


def size_ratio(attribution: Attribution, moment: int) -> float | None:
    """How many times as large the forward pass's blocks are in the last step as in any step before it.

    The median by bytes over the call sites that both have; None without an earlier step.
    """
    starts = repetitions(attribution, moment)
    if len(starts) < 2:
        return None
    ratios = sorted(_ratios(attribution, int(starts[0]), int(starts[-1])))
    total, passed = sum(size for _, size in ratios), 0
    for ratio, size in ratios:
        passed += size
        if 2 * passed >= total:
            return ratio
    return None


def _ratios(attribution: Attribution, first: int, last: int) -> Iterator[tuple[float, int]]:
    """For each call site of a forward pass, its largest block since `last` against that before, and its size."""
    replayed, places = attribution.replayed, attribution.call_sites.place_of
    allocated = replayed.allocated_by
    codes = attribution.phases.codes_of(allocated)
    forward = (codes == phase_code(Phase.FORWARD)) & (allocated >= first)
    largest = []
    for chosen in (forward & (allocated < last), forward & (allocated >= last)):
        highest = np.zeros(int(places.max(initial=-1)) + 1, dtype=np.int64)
        np.maximum.at(highest, places[chosen], replayed.requested_bytes[chosen])
        largest.append(highest)
    before, now = largest
    for place in np.flatnonzero((before > 0) & (now > 0)).tolist():
        yield int(now[place]) / int(before[place]), int(now[place])
