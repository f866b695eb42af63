"""Follow the roles over a recording: bytes by role, lowest and highest moment and current module, in columns."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ligerprof.analyzers.attribution.blocks import Attribution
from ligerprof.analyzers.attribution.phases import EventPhases, phase_of_code
from ligerprof.roles import ROLE_CODES, ROLES, Phase, Role
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.trace import Int64s

# a recording of fewer moments has a column for each
MOST_COLUMNS = 2**17
_EVENTS_AROUND_MARKS = 500
_TIME_LIMIT_US = 2**53


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningTotals:
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
        times_us: when each column starts, and the last event; None unless every event has a time and they ascend.
        lowest_bytes: the fewest allocated bytes within each column.
        roles: bytes at those moments, without roles that are always 0; they add up to `allocated_bytes`.
        moved_bytes: bytes allocated and freed before the start of each column, and before the end of the last.
        running: what ran, each combination once.
        running_of: index into `running` of each column.
    """

    device: int
    starts: Int64s
    moments: Int64s
    last_moment: int
    times_us: Int64s | None
    allocated_bytes: Int64s
    lowest_bytes: Int64s
    reserved_bytes: Int64s
    roles: Mapping[Role, Int64s]
    moved_bytes: Int64s
    peak_column: int
    running: tuple[RunningTotals, ...]
    running_of: Int64s

    def phases(self) -> list[Phase | None]:
        """The phase that ran in each column."""
        return [self.running[index].phase for index in self.running_of.tolist()]


def role_timeline(
    attribution: Attribution, role_codes: Int64s, marks: Iterable[int] = (), *, columns: int = MOST_COLUMNS
) -> RoleTimeline:
    """Sum the blocks of each role at the highest moment of each column.

    Args:
        role_codes: index in `ROLES` of each block.
        marks: moments around which every event gets its own column, as around the peak.
        columns: the most columns, without those around the marks.
    """
    replayed = attribution.replayed
    peak = replayed.peak_moment()
    starts, moments = _columns(replayed, {peak, *marks}, columns)
    allocated, times = replayed.allocated_bytes, event_times(replayed)
    moved = np.append(0, np.cumsum(np.abs(np.diff(allocated))))
    running, running_of = _running(attribution.phases, moments - 1)
    return RoleTimeline(
        device=replayed.device,
        starts=starts,
        moments=moments,
        last_moment=replayed.last_moment,
        # a moment begins with the event before it, and the first with the first event
        times_us=None if times is None else np.append(times[np.maximum(starts - 1, 0)], times[-1]),
        allocated_bytes=allocated[moments],
        lowest_bytes=np.minimum.reduceat(allocated, starts),
        reserved_bytes=replayed.reserved_bytes[moments],
        roles=_bytes_by_role(replayed, moments, role_codes),
        moved_bytes=np.append(moved[starts], moved[-1]),
        peak_column=int(np.searchsorted(starts, peak, "right")) - 1,
        running=running,
        running_of=running_of,
    )


def event_times(replayed: Replay) -> Int64s | None:
    """Microseconds of each event; None unless every event has a time and they ascend.

    A simulated recording has none: its events count on by one microsecond.
    """
    times = replayed.trace.numbers("time_us")
    if not len(times) or times[0] <= 0 or times[-1] >= _TIME_LIMIT_US:
        return None
    steps = np.diff(times)
    return None if (steps < 0).any() or (steps == 1).all() else times


def held_bytes(replayed: Replay, blocks: Int64s, sizes: Int64s) -> Int64s:
    """The sum of the sizes of some blocks at each moment; `sizes` are those of the chosen blocks."""
    allocated, freed = replayed.allocated_by[blocks], replayed.freed_by[blocks]
    changes = np.zeros(replayed.last_moment + 1, dtype=np.int64)
    changes[0] = sizes[allocated < 0].sum()
    # an event allocates or frees one block
    changes[allocated[allocated >= 0] + 1] = sizes[allocated >= 0]
    changes[freed[freed >= 0] + 1] = -sizes[freed >= 0]
    return np.cumsum(changes)


def _columns(replayed: Replay, marks: set[int], columns: int) -> tuple[Int64s, Int64s]:
    """The first moment of each stretch and its highest one."""
    count = replayed.last_moment + 1
    stretches = [np.linspace(0, count, min(count, columns), endpoint=False).astype(np.int64)]
    for mark in marks:
        near = np.arange(max(0, mark - _EVENTS_AROUND_MARKS), min(count, mark + _EVENTS_AROUND_MARKS + 1))
        stretches.append(near.astype(np.int64))
    starts: Int64s = np.unique(np.concatenate(stretches))
    if len(starts) == count:
        return starts, starts
    allocated = replayed.allocated_bytes
    highest = [start + int(np.argmax(allocated[start:stop])) for start, stop in pairwise([*starts.tolist(), count])]
    return starts, np.array(highest, dtype=np.int64)


def _bytes_by_role(replayed: Replay, moments: Int64s, role_codes: Int64s) -> dict[Role, Int64s]:
    held: dict[Role, Int64s] = {}
    for code in sorted(set(np.unique(role_codes).tolist()) - {ROLE_CODES[Role.ALLOCATOR_ROUNDING]}):
        blocks = np.flatnonzero(role_codes == code)
        held[ROLES[code]] = held_bytes(replayed, blocks, replayed.requested_bytes[blocks])[moments]
    named = sum(held.values(), np.zeros(len(moments), dtype=np.int64))
    held[Role.ALLOCATOR_ROUNDING] = replayed.allocated_bytes[moments] - named
    return {role: held[role] for role in ROLES if role in held and held[role].any()}


def _running(phases: EventPhases, events: Int64s) -> tuple[tuple[RunningTotals, ...], Int64s]:
    """What ran at each event, numbered; event -1 is before the recording."""
    keys = np.stack([np.append(column, -1)[events] for column in (phases.steps, phases.shown, phases.stamp_of)])
    distinct, numbers = np.unique(keys, axis=1, return_inverse=True)
    found = []
    for step, code, stamp_index in distinct.T.tolist():
        stamp = phases.stamps[stamp_index] if stamp_index >= 0 else None
        found.append(
            RunningTotals(
                step=max(step, 0),
                phase=phase_of_code(code),
                module=stamp.module if stamp else "",
                node=stamp.node if stamp else "",
            )
        )
    return tuple(found), numbers.reshape(-1).astype(np.int64)
