"""Follow the roles over a recording: bytes by role, largest holders and current module at a few thousand moments."""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ligerprof.analyzers.attribution.blocks import Attribution
from ligerprof.analyzers.attribution.phases import EventPhases
from ligerprof.models.module_names import without_indices
from ligerprof.roles import Phase, Role
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.trace import Int64s

# twice the pixels of a wide screen, and each event around the peak
_STRETCHES = 2500
_EVENTS_AROUND_PEAK = 400
_MOST_HOLDERS = 2000
_NAMED_HOLDERS = 3


@dataclass(frozen=True, slots=True)
class Holder:
    """Blocks that share a role, a module and a frame; all layers count as one module, `layers.*`."""

    role: Role
    module: str
    frame: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """The largest holders of a role from one column up to the role's next entry.

    Attributes:
        largest: up to three of (index of the holder, bytes, blocks), the largest first.
    """

    column: int
    role: Role
    largest: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """The step (0 without stamps), phase, module and autograd node that ran at a moment."""

    step: int
    phase: Phase | None
    module: str
    node: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleTimeline:
    """A recording in columns; each shows the highest moment of its stretch of events, so that no peak is lost.

    Attributes:
        starts: the first moment of each column.
        moments: the moment that each column shows.
        last_moment: the end of the last column.
        roles: bytes at those moments, without roles that are always 0; they add up to `allocated_bytes`.
        moved_bytes: bytes allocated and freed before the start of each column, and before the end of the last.
    """

    device: int
    starts: Int64s
    moments: Int64s
    last_moment: int
    allocated_bytes: Int64s
    reserved_bytes: Int64s
    roles: Mapping[Role, Int64s]
    moved_bytes: Int64s
    peak_column: int
    holders: tuple[Holder, ...]
    holdings: tuple[Holding, ...]
    running: tuple[Running, ...]


def role_timeline(attribution: Attribution) -> RoleTimeline:
    """Attribute each block that is live at a displayed moment, based on features as seen from the peak."""
    replayed, call_sites = attribution.replayed, attribution.call_sites
    starts, moments = _columns(replayed)
    spans = _BlockSpans(replayed, moments)
    peak = replayed.peak_moment()
    roles = attribution.roles_of(spans.blocks, peak)
    names = [(without_indices(site.module), site.description) for site in call_sites.sites]
    site_of = call_sites.site_of[spans.blocks].tolist()
    named = [Holder(role, *names[site]) for role, site in zip(roles, site_of, strict=True)]
    holders, holder_of = _number(named, spans.sizes)
    return RoleTimeline(
        device=replayed.device,
        starts=starts,
        moments=moments,
        last_moment=replayed.last_moment,
        allocated_bytes=replayed.allocated_bytes[moments],
        reserved_bytes=replayed.reserved_bytes[moments],
        roles=_bytes_by_role(replayed, moments, spans, roles),
        moved_bytes=_moved_bytes(replayed.allocated_bytes, starts),
        peak_column=int(np.searchsorted(starts, peak, "right")) - 1,
        holders=holders,
        holdings=tuple(_holdings(spans, holders, holder_of)),
        running=tuple(_running(attribution.phases, moment - 1) for moment in moments.tolist()),
    )


def _columns(replayed: Replay) -> tuple[Int64s, Int64s]:
    """The first moment of each stretch and its highest one."""
    count = replayed.last_moment + 1
    peak = replayed.peak_moment()
    near = np.arange(max(0, peak - _EVENTS_AROUND_PEAK), min(count, peak + _EVENTS_AROUND_PEAK + 1))
    even = np.linspace(0, count, min(count, _STRETCHES), endpoint=False).astype(np.int64)
    starts = np.unique(np.concatenate([even, near]).astype(np.int64))
    allocated = replayed.allocated_bytes
    highest = [start + int(np.argmax(allocated[start:stop])) for start, stop in pairwise([*starts.tolist(), count])]
    return starts, np.array(highest, dtype=np.int64)


class _BlockSpans:
    """The blocks that are live in any column, and the columns that they are live in: `first` up to `end`."""

    def __init__(self, replayed: Replay, moments: Int64s) -> None:
        first = np.searchsorted(moments, replayed.allocated_by, "right")
        freed = np.searchsorted(moments, replayed.freed_by, "right")
        end = np.where(replayed.freed_by < 0, len(moments), freed)
        self.blocks: Int64s = np.flatnonzero(first < end).astype(np.int64)
        self.first: Int64s = first[self.blocks].astype(np.int64)
        self.end: Int64s = end[self.blocks].astype(np.int64)
        self.sizes: Int64s = replayed.requested_bytes[self.blocks]
        self.columns = len(moments)


def _bytes_by_role(replayed: Replay, moments: Int64s, spans: _BlockSpans, found: Sequence[Role]) -> dict[Role, Int64s]:
    order = list(Role)
    codes = np.array([order.index(role) for role in found], dtype=np.int64)
    changes = np.zeros((len(order), spans.columns + 1), dtype=np.int64)
    np.add.at(changes, (codes, spans.first), spans.sizes)
    np.subtract.at(changes, (codes, spans.end), spans.sizes)
    held = np.cumsum(changes, axis=1)[:, :-1]
    held[order.index(Role.ALLOCATOR_ROUNDING)] = replayed.allocated_bytes[moments] - held.sum(axis=0)
    return {role: row for role, row in zip(order, held, strict=True) if row.any()}


def _moved_bytes(allocated_bytes: Int64s, starts: Int64s) -> Int64s:
    moved = np.append(0, np.cumsum(np.abs(np.diff(allocated_bytes))))
    return np.append(moved[starts], moved[-1]).astype(np.int64)


def _number(named: Sequence[Holder], sizes: Int64s) -> tuple[tuple[Holder, ...], list[int]]:
    """Number the holders; beyond a limit, the small holders of each role are merged."""
    totals: Counter[Holder] = Counter()
    for holder, size in zip(named, sizes.tolist(), strict=True):
        totals[holder] += size
    kept = {holder for holder, _ in totals.most_common(_MOST_HOLDERS)}
    numbers: dict[Holder, int] = {}
    of_block = [
        numbers.setdefault(holder if holder in kept else Holder(holder.role, "", "others"), len(numbers))
        for holder in named
    ]
    return tuple(numbers), of_block


def _holdings(spans: _BlockSpans, holders: Sequence[Holder], holder_of: Sequence[int]) -> Iterator[Holding]:
    """Yield an entry for each column and role whose largest holders change."""
    changes: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    columns = zip(spans.first.tolist(), spans.end.tolist(), spans.sizes.tolist(), holder_of, strict=True)
    for first, end, size, holder in columns:
        changes[first].append((holder, size, 1))
        changes[end].append((holder, -size, -1))
    held: dict[Role, dict[int, tuple[int, int]]] = defaultdict(dict)
    last: dict[Role, tuple[tuple[int, int, int], ...]] = {}
    for column in sorted(changes.keys() - {spans.columns}):
        for holder, size, count in changes[column]:
            of_role = held[holders[holder].role]
            before = of_role.pop(holder, (0, 0))
            if before[1] + count:
                of_role[holder] = (before[0] + size, before[1] + count)
        for role in {holders[holder].role for holder, _, _ in changes[column]}:
            largest = _largest(held[role])
            if largest != last.get(role):
                last[role] = largest
                yield Holding(column=column, role=role, largest=largest)


def _largest(held: Mapping[int, tuple[int, int]]) -> tuple[tuple[int, int, int], ...]:
    found = heapq.nlargest(_NAMED_HOLDERS, held.items(), key=lambda item: (item[1][0], -item[0]))
    return tuple((holder, size, count) for holder, (size, count) in found)


def _running(phases: EventPhases, event: int) -> Running:
    """The step, phase, module and node of an event; -1 is before the recording."""
    stamp = phases.stamps[phases.stamp_of[event]] if event >= 0 else None
    return Running(
        step=int(phases.steps[event]) if event >= 0 else 0,
        phase=phases.phase_at(event),
        module=stamp.module if stamp else "",
        node=stamp.node if stamp else "",
    )
