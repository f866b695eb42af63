"""Replay a recording whose events all fit each other in whole columns, instead of event by event."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ligerprof.snapshots.distinct import numbered
from ligerprof.snapshots.events import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    EventColumns,
)
from ligerprof.snapshots.final import FinalSegments
from ligerprof.snapshots.rewind import frees_carry_the_owners_stack
from ligerprof.snapshots.state import DeviceState, HeldBlock, Outcome
from ligerprof.snapshots.trace import DeviceTrace, Int64s
from ligerprof.torch_memory.allocator.sizes import MIN_BLOCK_BYTES, SMALL_REQUEST_BYTES, SizeRules

Flags = npt.NDArray[np.bool_]

_CYCLE = 3
# one in so many addresses is enough to find events that do not fit
_FEW_SHARE = 64
_ODD_NUMBER = 0x9E3779B97F4A7C15
# more overlaps of blocks and addresses than this, per block, take as long as replaying event by event
_MOST_CELLS = 16


def replay_fitting(
    trace: DeviceTrace,
    columns: EventColumns,
    final: FinalSegments,
    rules: SizeRules,
) -> Outcome | None:
    """Replay events that all fit and end in `final`; None if they do not, or if only the slow replay can tell.

    The outcome equals that of the slow replay, which starts from an empty device or from the state that rewinding
    gives. Recordings of expandable segments, or with a max_split_size, are left to it.
    """
    is_expandable = ((columns.actions == SEGMENT_MAP) | (columns.actions == SEGMENT_UNMAP)).any()
    if is_expandable or rules.expandable_segments or rules.max_split_bytes is not None:
        return None
    ranges = _Ranges.of(columns, final)
    events = _Events.of(columns, final)
    if ranges is None or events is None:
        return None
    blocks = _Blocks(columns, events, final, ranges, rules)
    if not blocks.fit():
        return None
    return blocks.result(trace, columns, final)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Ranges:
    """The address ranges of all segments that ever existed, which do not overlap.

    Attributes:
        initially: whether each existed before the first event.
        keys: range * width + event of each segment's allocation and release, ascending.
        grows: whether each of these is an allocation.
    """

    starts: Int64s
    ends: Int64s
    initially: Flags
    keys: Int64s
    grows: Flags
    width: int

    @classmethod
    def of(cls, columns: EventColumns, final: FinalSegments) -> "_Ranges | None":
        if final.is_expandable.any():
            return None
        events = np.flatnonzero((columns.actions == SEGMENT_ALLOC) | (columns.actions == SEGMENT_FREE))
        starts = np.append(columns.addresses[events], final.starts)
        sizes = np.append(columns.sizes[events], final.sizes)
        unique, first, number = np.unique(starts, return_index=True, return_inverse=True)
        ends = unique + sizes[first]
        if (
            (final.filled != final.sizes).any()
            or (sizes[first][number] != sizes).any()
            or (sizes <= 0).any()
            or ((starts | sizes) % MIN_BLOCK_BYTES).any()
            or (unique[1:] < ends[:-1]).any()
        ):
            return None
        width = len(columns.actions) + 2
        keys = number[: len(events)] * width + events
        order = np.argsort(keys)
        keys, grows, of = keys[order], (columns.actions[events] == SEGMENT_ALLOC)[order], number[: len(events)][order]
        again = of[1:] == of[:-1]
        exists = np.bincount(number[len(events) :], minlength=len(unique))
        is_first, is_last = np.append(True, ~again)[: len(of)], np.append(~again, True)[: len(of)]
        if (
            (exists > 1).any()
            or (again & (grows[1:] == grows[:-1])).any()
            or (grows[is_last] != (exists[of[is_last]] == 1)).any()
        ):
            return None
        initially = np.ones(len(unique), dtype=bool)
        initially[of[is_first]] = ~grows[is_first]
        return cls(starts=unique, ends=ends, initially=initially, keys=keys, grows=grows, width=width)

    def cover(self, ranges: Int64s, since: Int64s, until: Int64s) -> bool:
        """Whether each range exists from after event `since` up to event `until`; -1 is before the first event."""
        place = np.searchsorted(self.keys, ranges * self.width + since)
        of = np.append(self.keys // self.width, [-1])
        exists = self.initially[ranges]
        changed = of[place - 1] == ranges
        exists[changed] = self.grows[place[changed] - 1]
        ends = np.append(self.keys % self.width, [0])[place]
        return bool((exists & ((of[place] != ranges) | (ends > until))).all())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Events:
    """Events of blocks by address, then by time; a block that is older than the trace has an allocation, too.

    Attributes:
        times: number of each event, after the numbers of the older blocks.
        older: number of older blocks.
        starts: whether each event is the first at its address.
    """

    addresses: Int64s
    actions: Int64s
    times: Int64s
    older: int
    starts: Flags

    @classmethod
    def of(cls, columns: EventColumns, final: FinalSegments) -> "_Events | None":
        moves = columns.actions <= FREE_COMPLETED
        # where the events do not fit, those of a few addresses show it in less time
        if _by_address(columns, moves & _are_few(columns.addresses)) is None:
            return None
        times = _by_address(columns, moves)
        if times is None or not len(times):
            return None
        addresses, actions = columns.addresses[times], columns.actions[times]
        again = addresses[1:] == addresses[:-1]
        first = np.flatnonzero(np.append(True, ~again))
        last = np.append(first[1:], len(times)) - 1
        at_end = final.addresses[final.held_by_address]
        if (at_end[1:] == at_end[:-1]).any():
            return None
        seen = addresses[first]
        known = seen[np.minimum(np.searchsorted(seen, at_end), len(seen) - 1)] == at_end
        if not np.array_equal(addresses[last][actions[last] != FREE_COMPLETED], at_end[known]):
            return None
        opened = first[actions[first] != ALLOC]
        older = np.append(addresses[opened], at_end[~known])
        places = np.append(opened, np.searchsorted(addresses, at_end[~known]))
        order = np.argsort(older)
        older, places = older[order], places[order]
        addresses = np.insert(addresses, places, older)
        return cls(
            addresses=addresses,
            actions=np.insert(actions, places, ALLOC),
            times=np.insert(times + len(older), places, np.arange(len(older))),
            older=len(older),
            starts=np.append(True, addresses[1:] != addresses[:-1]),
        )


def _by_address(columns: EventColumns, chosen: Flags) -> Int64s | None:
    """The chosen events by address, then by time; None if those of an address are not in turns."""
    times = np.flatnonzero(chosen)
    times = times[np.argsort(columns.addresses[times], kind="stable")]
    addresses, actions = columns.addresses[times], columns.actions[times]
    again = addresses[1:] == addresses[:-1]
    return None if (again & (actions[1:] != (actions[:-1] + 1) % _CYCLE)).any() else times


def _are_few(addresses: Int64s) -> Flags:
    """Whether each address is one of a small share, drawn by its bits."""
    mixed = addresses.view(np.uint64) * np.uint64(_ODD_NUMBER)
    return mixed < np.uint64(2**64 // _FEW_SHARE)


class _Blocks:
    """All blocks by address, then by time."""

    def __init__(
        self, columns: EventColumns, events: _Events, final: FinalSegments, ranges: _Ranges, rules: SizeRules
    ) -> None:
        self.events, self.ranges, self.rules = events, ranges, rules
        self.never = len(columns.actions) + events.older
        self.bits = (self.never + 1).bit_length()
        rows = np.flatnonzero(events.actions == ALLOC)
        # two events more, so that every block has two after it
        same = np.append(~events.starts, [False, False, False])
        actions, times = np.append(events.actions, [ALLOC, ALLOC]), np.append(events.times, [0, 0])
        one, two = same[rows + 1], same[rows + 1] & same[rows + 2] & (actions[rows + 1] == FREE_REQUESTED)
        self.addresses, self.made = events.addresses[rows], events.times[rows]
        self.requested_free = np.where(one & (actions[rows + 1] == FREE_REQUESTED), times[rows + 1], self.never)
        self.freed = np.where(one & (actions[rows + 1] == FREE_COMPLETED), times[rows + 1], self.never)
        self.freed = np.where(two & (actions[rows + 2] == FREE_COMPLETED), times[rows + 2], self.freed)
        self.is_older = self.made < events.older
        self.stays = self.freed == self.never
        # the event that states the size: the allocation, else the release
        states = np.where(self.is_older, self.freed, self.made) - events.older
        known = self.is_older & self.stays
        self.requested = np.append(columns.sizes, 0)[np.where(known, len(columns.sizes), states)]
        self.final_addresses = final.addresses[final.held_by_address]
        self.final_sizes = final.block_sizes[final.held_by_address]
        self.known = known
        self.cells = events.addresses[events.starts]
        self.cell_of = (np.cumsum(events.starts) - 1)[rows]
        self.range_of = np.searchsorted(ranges.starts, self.addresses, "right") - 1

    def fit(self) -> bool:
        """Find the size of each block; False unless all blocks fit."""
        if not len(self.ranges.starts) or (self.range_of < 0).any() or not self._ends_in_final():
            return False
        if not self._find_sizes() or (self.final_sizes != self.sizes[self.stays]).any():
            return False
        ends = self.addresses + self.sizes
        older = self.events.older
        return (
            bool((ends <= self.ranges.ends[self.range_of]).all())
            and self.ranges.cover(self.range_of, np.maximum(self.made - older, -1), self.freed - older)
            and self._are_apart(ends)
        )

    def _ends_in_final(self) -> bool:
        return np.array_equal(self.addresses[self.stays], self.final_addresses)

    def _find_sizes(self) -> bool:
        distinct, size_of = numbered(self.requested)
        self.sizes = np.array([self.rules.round_request(size) for size in distinct.tolist()], dtype=np.int64)[size_of]
        self.sizes[self.known] = self.final_sizes[np.searchsorted(self.final_addresses, self.addresses[self.known])]
        is_large = self.sizes > SMALL_REQUEST_BYTES
        large, all_blocks = (np.bincount(self.range_of[which]) for which in (is_large, slice(None)))
        # rewinding is exact if no small block can be in the rest of a large one
        mixed = (large > 0) & (large < all_blocks[: len(large)])
        if (self.sizes <= 0).any() or ((self.addresses | self.sizes) % MIN_BLOCK_BYTES).any() or mixed.any():
            return False
        self._add_rests(np.flatnonzero(is_large & ~self.known))
        return True

    def _add_rests(self, blocks: Int64s) -> None:
        """Add the rest of the free block to those large blocks that leave too little of it to split off."""
        ends = self.addresses[blocks] + self.sizes[blocks]
        walls = self.ranges.ends[self.range_of[blocks]]
        unsplit_bytes = self.rules.smallest_rest(SMALL_REQUEST_BYTES + 1) - 1
        last = np.minimum(ends + unsplit_bytes, walls)
        after = np.searchsorted(self.cells, last, "right")
        near = np.flatnonzero((after > np.searchsorted(self.cells, ends, "right")) | (last == walls))
        blocks, ends, walls, last, after = (each[near] for each in (blocks, ends, walls, last, after))
        moments = np.where(self.is_older[blocks], self.freed[blocks], self.made[blocks])
        keys = (np.cumsum(self.events.starts) - 1 << self.bits) | self.events.times
        cells = np.searchsorted(self.cells, ends)
        rests = np.where(last == walls, walls, ends)
        searched = np.flatnonzero(cells < after)
        while len(searched):
            cell = cells[searched]
            before = np.searchsorted(keys, cell << self.bits | moments[searched]) - 1
            live = (keys[before] >> self.bits == cell) & (self.events.actions[before] != FREE_COMPLETED) & (before >= 0)
            rests[searched[live]] = self.cells[cell[live]]
            cells[searched] += 1
            searched = searched[~live & (cell + 1 < after[searched])]
        self.sizes[blocks] = np.maximum(rests, ends) - self.addresses[blocks]

    def _are_apart(self, ends: Int64s) -> bool:
        """Whether no block overlaps another, and each starts where the free block around it starts."""
        counts = np.searchsorted(self.cells, ends) - self.cell_of
        total = int(counts.sum())
        if total > _MOST_CELLS * len(counts):
            return False
        inside = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        cells = np.repeat(self.cell_of, counts) + inside
        keys = np.sort(cells << self.bits | np.repeat(self.made, counts), kind="stable")
        cells, times = keys >> self.bits, keys & (1 << self.bits) - 1
        block_at = np.zeros(self.never + 1, dtype=np.int64)
        block_at[self.made] = np.arange(len(self.made))
        blocks = block_at[times]
        if ((cells[1:] == cells[:-1]) & (self.freed[blocks[:-1]] >= times[1:])).any():
            return False
        inner = np.flatnonzero(~self.is_older & (self.addresses != self.ranges.starts[self.range_of]))
        place = np.searchsorted(keys, (self.cell_of[inner] - 1) << self.bits | self.made[inner]) - 1
        below = blocks[place]
        return bool(
            (
                (place >= 0)
                & (cells[place] == self.cell_of[inner] - 1)
                & (self.freed[below] > self.made[inner])
                & (ends[below] == self.addresses[inner])
            ).all()
        )

    def result(self, trace: DeviceTrace, columns: EventColumns, final: FinalSegments) -> Outcome:
        """The outcome, in the order of the trace."""
        older = self.events.older
        made = np.append(np.arange(older), older + np.flatnonzero(columns.actions == ALLOC))
        sizes, numbers = np.zeros(self.never, dtype=np.int64), np.zeros(self.never, dtype=np.int64)
        sizes[self.made] = self.sizes
        numbers[made] = np.arange(len(made))
        freed = np.zeros(self.never + 1, dtype=np.int64)
        freed[self.requested_free] = numbers[self.made]
        keeps_stacks = bool(older) and frees_carry_the_owners_stack(trace, columns)
        blocks = {}
        for row in np.flatnonzero(self.is_older).tolist():
            address, is_allocated = int(self.addresses[row]), bool(self.requested_free[row] < self.never)
            if self.known[row]:
                block = final.held_block(final.held_by_address[np.searchsorted(self.final_addresses, address)])
                blocks[address] = block._replace(allocated=True) if is_allocated else block
                continue
            event = trace[int(self.freed[row]) - older] if keeps_stacks else {}
            blocks[address] = HeldBlock(
                address,
                int(self.requested[row]),
                int(self.sizes[row]),
                allocated=is_allocated,
                frames=event.get("frames", ()),
            )
        reserved = int((self.ranges.ends - self.ranges.starts)[self.ranges.initially].sum())
        return Outcome(
            before=DeviceState(blocks=blocks, reserved_bytes=reserved),
            held=sizes[made],
            freed=freed[older + np.flatnonzero(columns.actions == FREE_REQUESTED)],
        )
