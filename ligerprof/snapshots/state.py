"""The state of a device before and after a recording: its segments, free space, and the blocks that are not free."""

import itertools
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from operator import itemgetter, methodcaller
from typing import Any, NamedTuple

import numpy as np

from ligerprof.errors import SnapshotFormatError
from ligerprof.snapshots.trace import (
    ADDRESS_LIMIT,
    GROWS,
    SHRINKS,
    SIZE_LIMIT,
    TOTAL_LIMIT,
    Action,
    DeviceTrace,
    EventColumns,
    Flags,
    Int64s,
)
from ligerprof.text import short_repr
from ligerprof.torch_memory.allocator.settings import SizeRules

# newer addresses are inserted one by one if they are fewer than this share
_FEW_SHARE = 64


class _Mark(int):
    """The size of the newest free block at the last search, recognized by identity; calculations make plain numbers."""


class FreeSpace:
    """Free blocks by address; adjacent ones of one segment are merged.

    Attributes:
        starts: start address to size of each free block.
        ends: end address to start of each free block.
        borders: addresses at which memory from cudaMalloc starts; free blocks never merge across one.
    """

    __slots__ = ("_mark", "_sorted", "borders", "ends", "starts")

    def __init__(self) -> None:
        self.starts: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        self.borders: set[int] = set()
        self._sorted: list[int] = []
        self._mark: _Mark | None = None

    def give(self, start: int, size: int) -> None:
        """Add a free block and merge it with adjacent ones."""
        end = start + size
        if end in self.starts and end not in self.borders:
            end += self.starts.pop(end)
        if start in self.ends and start not in self.borders:
            start = self.ends.pop(start)
        self.starts[start], self.ends[end] = end - start, start

    def cut(self, start: int, size: int) -> bool:
        """Take `[start, start + size)` out of the free block that contains it; False if none does."""
        holder = self.around(start)
        if holder is None or start + size > holder[0] + holder[1]:
            return False
        begin, end = holder[0], holder[0] + holder[1]
        del self.starts[begin]
        self.ends.pop(end, None)
        if begin < start:
            self._put(begin, start)
        if start + size < end:
            self._put(start + size, end)
        return True

    def around(self, address: int) -> tuple[int, int] | None:
        """Start and size of the free block that contains `address`, if any."""
        size = self.starts.get(address)
        if size is not None:
            return address, size
        self._update_order()
        place = bisect_left(self._sorted, address)
        while place and self._sorted[place - 1] not in self.starts:
            place -= 1
            del self._sorted[place]
        start = self._sorted[place - 1] if place else address
        return (start, self.starts[start]) if start < address < start + self.starts[start] else None

    def _update_order(self) -> None:
        """Add the starts since the last search to the sorted ones; replays change `starts` without calling a method."""
        # a dict has its newest keys last; a key that was taken out and put back lost its mark
        newer = list(takewhile(lambda start: self.starts[start] is not self._mark, reversed(self.starts)))
        if len(newer) * _FEW_SHARE < len(self._sorted):
            for start in newer:
                insort(self._sorted, start)
        else:
            self._sorted = sorted({*self._sorted, *newer})
        if newer:
            self._mark = self.starts[newer[0]] = _Mark(self.starts[newer[0]])

    def _put(self, start: int, end: int) -> None:
        self.starts[start] = end - start
        self.ends[end] = start


class HeldBlock(NamedTuple):
    """A block at some moment.

    Attributes:
        requested_bytes: the program's request.
        allocated: False if it waits for another stream, which torch no longer counts as allocated.
        frames: the stack of its allocation, as in the file.
    """

    address: int
    requested_bytes: int
    block_bytes: int
    allocated: bool = True
    frames: Any = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceState:
    """A device's free blocks, its other blocks by address, and the bytes of all segments."""

    space: FreeSpace = field(default_factory=FreeSpace)
    blocks: Sequence[HeldBlock] = ()
    reserved_bytes: int = 0


_ALLOCATED = "active_allocated"
# active_pending_free, active_awaiting_free: waiting for another stream
_HELD = "active"


@dataclass(frozen=True, kw_only=True, eq=False)
class FinalSegments:
    """The `segments` of a device, and the blocks in them, which are contiguous within a segment.

    Attributes:
        starts: address of each segment.
        sizes: its `total_size`.
        is_expandable: whether its ranges merge once the memory between them is mapped.
        block_counts: number of its blocks, free ones included.
        addresses: of all blocks, segment by segment.
        requested: the program's request for each block.
        block_sizes: bytes of each block.
        held: False for free blocks.
        allocated: False for free blocks, and for those that wait for another stream.
        frames: the stack of each block's allocation, as in the file.
    """

    starts: Int64s
    sizes: Int64s
    is_expandable: Flags
    block_counts: Int64s
    addresses: Int64s
    requested: Int64s
    block_sizes: Int64s
    held: Flags
    allocated: Flags
    frames: Sequence[Any]

    @classmethod
    def of(cls, segments: Sequence[Mapping[str, Any]], where: str) -> "FinalSegments":
        """Read the `segments` of a snapshot, which are not kept.

        Raises:
            SnapshotFormatError: a value is not a block, or an address or size is not a number in range.
        """
        starts, sizes = (
            _numbers([segment.get(key) for segment in segments], limit, f"{where}: a segment's {key}")
            for key, limit in (("address", ADDRESS_LIMIT), ("total_size", SIZE_LIMIT))
        )
        of_segments = [segment.get("blocks", []) for segment in segments]
        are_lists = all(isinstance(blocks, list) for blocks in of_segments)
        blocks: list[dict[str, Any]] = list(itertools.chain.from_iterable(of_segments)) if are_lists else []
        if not are_lists or not {dict}.issuperset(map(type, blocks)):
            raise SnapshotFormatError(f"{where}: a segment's `blocks` is not a list of blocks. Was the file damaged?")
        of_blocks, requested, states, frames = _values(blocks)
        block_sizes = _numbers(of_blocks, SIZE_LIMIT, f"{where}: a block's size")
        if max(sizes.sum(dtype=np.float64), block_sizes.sum(dtype=np.float64)) >= TOTAL_LIMIT:
            raise SnapshotFormatError(f"{where}: its segments have more bytes than 62 bits can count. Was it damaged?")
        counts = np.fromiter(map(len, of_segments), dtype=np.int64, count=len(of_segments))
        return cls(
            starts=starts,
            sizes=sizes,
            is_expandable=np.array([segment.get("is_expandable") is True for segment in segments], dtype=bool),
            block_counts=counts,
            addresses=_addresses(starts, counts, block_sizes),
            requested=_numbers(requested, SIZE_LIMIT, f"{where}: a block's requested_size"),
            block_sizes=block_sizes,
            held=np.array([isinstance(state, str) and state.startswith(_HELD) for state in states], dtype=bool),
            allocated=np.array([state == _ALLOCATED for state in states], dtype=bool),
            frames=frames,
        )

    @property
    def reserved_bytes(self) -> int:
        """The bytes of all segments."""
        return int(self.sizes.sum())

    @cached_property
    def held_by_address(self) -> Int64s:
        """Indices of the blocks that are not free, by address."""
        held = np.flatnonzero(self.held)
        return held[np.argsort(self.addresses[held], kind="stable")]

    def held_block(self, index: int) -> HeldBlock:
        """One of the blocks that are not free."""
        return HeldBlock(
            address=int(self.addresses[index]),
            requested_bytes=int(self.requested[index]),
            block_bytes=int(self.block_sizes[index]),
            allocated=bool(self.allocated[index]),
            frames=self.frames[index],
        )

    def holds(self, blocks: Mapping[int, int], free: Mapping[int, int]) -> bool:
        """Whether these are the addresses and sizes of the blocks that are not free, and of the free space."""
        held = self.held_by_address
        addresses, sizes = self.addresses[held], self.block_sizes[held]
        # of several blocks at one address, all but the last are empty
        last = np.append(addresses[1:] != addresses[:-1], True)[: len(held)]
        return _are_equal(blocks, addresses[last], sizes[last]) and _are_equal(free, *self._free_runs())

    def _free_runs(self) -> tuple[Int64s, Int64s]:
        """Start and size of the free space between blocks."""
        free = np.flatnonzero(~self.held & (self.block_sizes > 0))
        free = free[np.argsort(self.addresses[free], kind="stable")]
        starts, ends = self.addresses[free], self.addresses[free] + self.block_sizes[free]
        if (starts[1:] < ends[:-1]).any():
            # overlapping segments, as only damaged files have them
            space = self.free_space().starts
            return np.array(list(space), dtype=np.int64), np.array(list(space.values()), dtype=np.int64)
        borders = self.starts[~self.is_expandable]
        is_first = np.append(True, (starts[1:] != ends[:-1]) | np.isin(starts[1:], borders))[: len(free)]
        firsts = np.flatnonzero(is_first)
        return starts[firsts], ends[np.append(firsts[1:], len(free))[: len(firsts)] - 1] - starts[firsts]

    def free_space(self) -> FreeSpace:
        """A new copy of the free blocks."""
        space = FreeSpace()
        space.borders.update(self.starts[~self.is_expandable].tolist())
        free = ~self.held & (self.block_sizes > 0)
        for start, size in zip(self.addresses[free].tolist(), self.block_sizes[free].tolist(), strict=True):
            space.give(start, size)
        return space


def _are_equal(known: Mapping[int, int], keys: Int64s, values: Int64s) -> bool:
    """Whether a mapping has exactly some distinct keys, with these values."""
    own = np.array([*known.keys(), *known.values()], dtype=np.int64).reshape(2, -1)
    expected = np.stack([keys, values])
    return np.array_equal(own[:, np.argsort(own[0])], expected[:, np.argsort(keys)])


def _values(blocks: Sequence[Mapping[str, Any]]) -> tuple[Sequence[Any], ...]:
    """Size, requested size, state and frames of each block."""
    try:
        # at once, since each look at a block may have to wait for memory
        rows = list(map(itemgetter("size", "requested_size", "state", "frames"), blocks))
    except KeyError:
        # only newer files contain a block's requested size
        rows = [
            (size, block.get("requested_size", size), block.get("state"), block.get("frames", ()))
            for block, size in zip(blocks, map(methodcaller("get", "size"), blocks), strict=True)
        ]
    return tuple(zip(*rows, strict=True)) or ((), (), (), ())


def _numbers(values: Sequence[Any], limit: int, what: str) -> Int64s:
    """The values as a column; raise a SnapshotFormatError that names the first one that is not in [0, limit)."""
    if {int}.issuperset(map(type, values)):
        with suppress(OverflowError):
            column = np.array(values, dtype=np.int64)
            if column.min(initial=0) >= 0 and column.max(initial=0) < limit:
                return column
    index, value = next(
        (index, value) for index, value in enumerate(values) if type(value) is not int or not 0 <= value < limit
    )
    raise SnapshotFormatError(f"{what} number {index} is {short_repr(value)}. Was the file damaged?")


def _addresses(starts: Int64s, counts: Int64s, block_sizes: Int64s) -> Int64s:
    before = np.cumsum(block_sizes) - block_sizes
    firsts = np.cumsum(counts) - counts
    has_blocks = counts > 0
    shifts = np.zeros(len(starts), dtype=np.int64)
    shifts[has_blocks] = starts[has_blocks] - before[firsts[has_blocks]]
    return before + np.repeat(shifts, counts)


_EVENTS_AT_ONCE = 2**16
# the remainder of a block is smaller than the smallest block that can be behind it
_MOST_ALLOCATIONS_BEHIND = 64


def state_before(trace: DeviceTrace, columns: EventColumns, final: FinalSegments, rules: SizeRules) -> DeviceState:
    """The state before the first event. What does not fit is left out, and the replay counts it as mismatches.

    Exact with one exception: a block of the large pool that was freed within the trace may have included an unsplit
    remainder of up to 1 MiB. It shows only if another block lay behind it.
    """
    mapped, reserved_bytes = _mapped_before(columns, final)
    starts = sorted(mapped.starts)
    ends = [start + mapped.starts[start] for start in starts]
    space = FreeSpace()
    space.borders = mapped.borders
    older = _OlderBlocks(trace, columns, final)
    upcoming = [*(block.address for block in older.blocks[1:]), ADDRESS_LIMIT]
    blocks = []
    # the range of memory that the blocks are in, and where its free memory starts
    place, free = 0, starts[0] if starts else 0
    for block, following in zip(older.blocks, upcoming, strict=False):
        while place < len(starts) and ends[place] <= block.address:
            _give(space, free, ends[place])
            place += 1
            free = starts[place] if place < len(starts) else 0
        if place == len(starts) or block.address < free:
            continue
        room = min(following, ends[place]) - block.address
        block_bytes = block.block_bytes
        if not block_bytes:
            block_bytes = rules.round_request(block.requested_bytes)
            room = older.room(block, block_bytes, room)
            if not rules.splits_off(block_bytes, room - block_bytes):
                block_bytes = room
        if block_bytes > room:
            continue
        _give(space, free, block.address)
        free = block.address + block_bytes
        blocks.append(block._replace(block_bytes=block_bytes))
    for start, end in zip([free, *starts[place + 1 :]], ends[place:], strict=False):
        _give(space, start, end)
    return DeviceState(space=space, blocks=blocks, reserved_bytes=reserved_bytes)


def _give(space: FreeSpace, start: int, end: int) -> None:
    if start < end:
        space.give(start, end - start)


def _mapped_before(columns: EventColumns, final: FinalSegments) -> tuple[FreeSpace, int]:
    """The ranges of memory before the first event, as one space without blocks, and the bytes of all segments."""
    space, reserved_bytes = FreeSpace(), final.reserved_bytes
    space.borders.update(final.starts[~final.is_expandable].tolist())
    for start, size in zip(final.starts.tolist(), final.sizes.tolist(), strict=True):
        _give(space, start, start + size)
    of_segments = np.flatnonzero(np.isin(columns.actions, (*GROWS, *SHRINKS)))[::-1]
    events = (column[of_segments].tolist() for column in (columns.actions, columns.addresses, columns.sizes))
    for action, address, size in zip(*events, strict=True):
        if action in GROWS:
            if action == Action.SEGMENT_ALLOC:
                space.borders.discard(address)
            if space.cut(address, size):
                reserved_bytes -= size
        else:
            if action == Action.SEGMENT_FREE:
                space.borders.add(address)
            space.give(address, size)
            reserved_bytes += size
    return space, reserved_bytes


class _OlderBlocks:
    """The blocks that are not free before the first event: their first event is a release, or they have no event.

    Attributes:
        blocks: by address; block_bytes is 0 if no segment states it.
    """

    def __init__(self, trace: DeviceTrace, columns: EventColumns, final: FinalSegments) -> None:
        moves = np.flatnonzero(columns.actions <= Action.FREE_COMPLETED)
        order = moves[np.argsort(columns.addresses[moves], kind="stable")]
        addresses, actions = columns.addresses[order], columns.actions[order]
        first = np.append(True, addresses[1:] != addresses[:-1])[: len(order)]
        made = first & (actions == Action.ALLOC)
        self._starts, self._made = addresses[made], order[made]
        held = final.held_by_address
        untouched = held[~np.isin(final.addresses[held], addresses[first])]
        found = {int(final.addresses[index]): final.held_block(index) for index in untouched.tolist()}
        at_end = dict(zip(final.addresses[held].tolist(), held.tolist(), strict=True))
        # the last event of each one's release
        self._freed: dict[int, int] = {}
        for row in np.flatnonzero(first & (actions != Action.ALLOC)).tolist():
            address, allocated = int(addresses[row]), bool(actions[row] == Action.FREE_REQUESTED)
            is_last = row + 1 == len(order) or bool(first[row + 1])
            if allocated and is_last and address in at_end:
                found[address] = final.held_block(at_end[address])._replace(allocated=True)
                continue
            is_completed = allocated and not is_last and actions[row + 1] == Action.FREE_COMPLETED
            event = self._freed[address] = int(order[row + is_completed])
            found[address] = HeldBlock(address, int(columns.sizes[event]), 0, allocated)
        if self._freed and frees_carry_the_owners_stack(trace, columns):
            for address, event in self._freed.items():
                found[address] = found[address]._replace(frames=trace[event].get("frames", ()))
        self.blocks = [found[address] for address in sorted(found)]

    def room(self, block: HeldBlock, block_bytes: int, room: int) -> int:
        """Bytes from a block up to the first allocation behind it that was made before its release, at most `room`."""
        place = int(np.searchsorted(self._starts, block.address + block_bytes))
        near = slice(place, place + _MOST_ALLOCATIONS_BEHIND)
        earlier = self._starts[near][self._made[near] < self._freed[block.address]]
        return min(room, int(earlier[0]) - block.address) if len(earlier) else room


def frees_carry_the_owners_stack(trace: DeviceTrace, columns: EventColumns) -> bool:
    """Whether free events repeat the stack of the allocation, as with context="alloc"."""
    made: dict[int, int] = {}
    for start in range(0, len(trace), _EVENTS_AT_ONCE):
        piece = slice(start, start + _EVENTS_AT_ONCE)
        pairs = zip(columns.actions[piece].tolist(), columns.addresses[piece].tolist(), strict=True)
        for index, (action, address) in enumerate(pairs, start):
            if action == Action.ALLOC:
                made[address] = index
            elif action == Action.FREE_REQUESTED and address in made and (stack := trace[made[address]].get("frames")):
                return _same_stack(stack, trace[index].get("frames"))
    return False


def _same_stack(first: Any, second: Any) -> bool:
    """Whether two lists of frames name the same places; compares no deeper, since values may contain themselves."""
    if not isinstance(first, list) or not isinstance(second, list) or len(first) != len(second):
        return False
    return all(one is other or _place(one) == _place(other) for one, other in zip(first, second, strict=True))


def _place(frame: Any) -> tuple[Any, ...]:
    values = [frame.get(key) for key in ("filename", "line", "name")] if isinstance(frame, dict) else [frame]
    return tuple(value if isinstance(value, (str, int)) else id(value) for value in values)
