"""Many programs at once, each from the same state of the allocator, as long as none needs another segment.

Every lane is an allocator of its own with its own sizes; all lanes of a call have the same order of events. One
operation on arrays makes a decision for all lanes. The decisions are those of states.py, on addresses without the
space between segments. A pool's free blocks are rows of arrays, one row per lane, in no order; an empty slot has the
key 0 and the start and end -1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ligerprof.torch_memory.allocator.states import AllocatorState, PoolView

Numbers = npt.NDArray[np.int64]
# a start or an end; half the bytes to search
Places = npt.NDArray[np.int32]

# a key is a size and an address, which decide between free blocks in this order
_ADDRESS_BITS = 32
_ADDRESSES = (1 << _ADDRESS_BITS) - 1
# at least as large as any key: of blocks that are used only if no other fits
_LAST = np.int64(1 << 62)
_MORE_SLOTS = 32


class _NoRoomError(Exception):
    """A lane needs another segment.

    Attributes:
        lane: the first lane that does.
    """

    def __init__(self, lane: int) -> None:
        super().__init__(lane)
        self.lane = lane


@dataclass(frozen=True, kw_only=True, slots=True)
class Events:
    """What all lanes do in a program.

    Attributes:
        operations: as in `AllocatorState.run`; the n-th held block is the n-th of `Lanes.held`.
        small: for each allocation, whether the small pool serves it.
        undone: for each allocation, whether its pool is at its free as it was right after it.
        slots: for each allocation, the row of the table of blocks that it uses.
        slot_count: rows of the table.
        left: allocations that are held at the end.
    """

    operations: tuple[int, ...]
    small: tuple[bool, ...]
    undone: tuple[bool, ...]
    slots: tuple[int, ...]
    slot_count: int
    left: tuple[int, ...]


def prepare(operations: Sequence[int], small: Sequence[bool], held_small: Sequence[bool]) -> Events:
    """Find what does not depend on sizes.

    Args:
        operations: as in `AllocatorState.run`.
        small: for each allocation, whether the small pool serves it.
        held_small: the same for the blocks that are held before.
    """
    undone = [False] * len(small)
    slots: list[int] = []
    spare: list[int] = []
    slot_count = count = 0
    # of each pool, the allocations since its last free that is not undone, without those that were undone
    opened: tuple[list[int], list[int]] = ([], [])
    live: dict[int, None] = {}
    for operation in operations:
        if operation == 0:
            opened[small[count]].append(count)
            live[count] = None
            slots.append(spare.pop() if spare else slot_count)
            slot_count = max(slot_count, slots[-1] + 1)
            count += 1
        elif operation > 0:
            number = operation - 1
            stack = opened[small[number]]
            if stack and stack[-1] == number:
                stack.pop()
                undone[number] = True
            else:
                stack.clear()
            del live[number]
            spare.append(slots[number])
        else:
            opened[held_small[-operation - 1]].clear()
    return Events(
        operations=tuple(operations),
        small=tuple(small),
        undone=tuple(undone),
        slots=tuple(slots),
        slot_count=slot_count,
        left=tuple(live),
    )


class _LanePool:
    """One pool in every lane.

    Args:
        view: the pool in the state that all lanes start from.
        lanes: how many.
    """

    def __init__(self, view: PoolView, lanes: int) -> None:
        blocks = _closed_up(view)
        self._smallest_rest, self._mapped = view.smallest_rest, view.mapped
        slots = len(blocks) + _MORE_SLOTS
        keys = np.zeros(slots, np.int64)
        starts, ends = np.full(slots, -1, np.int32), np.full(slots, -1, np.int32)
        for slot, (address, size) in enumerate(blocks):
            keys[slot] = size << _ADDRESS_BITS | address
            starts[slot], ends[slot] = address, address + size
        unused = np.zeros(slots, np.int64)
        unused[:_MORE_SLOTS] = np.arange(slots - 1, len(blocks) - 1, -1)
        keys, unused = np.tile(keys, (lanes, 1)), np.tile(unused, (lanes, 1))
        starts, ends = np.tile(starts, (lanes, 1)), np.tile(ends, (lanes, 1))
        self._set(keys, starts, ends, unused, np.full(lanes, _MORE_SLOTS, np.int64))

    def _set(self, keys: Numbers, starts: Places, ends: Places, unused: Numbers, count: Numbers) -> None:
        """Take these tables.

        Args:
            unused: the empty slots of each lane, of which `count` are valid.
        """
        self._keys, self._starts, self._ends, self._unused, self._count = keys, starts, ends, unused, count
        lanes, slots = keys.shape
        self._slots = slots
        self._first = np.arange(lanes, dtype=np.int64) * slots
        self._flat = keys.reshape(-1), starts.reshape(-1), ends.reshape(-1), unused.reshape(-1)
        self._gaps, self._same = np.empty_like(keys), np.empty(keys.shape, bool)
        self._same_flat = self._same.reshape(-1)

    def select(self, lanes: Numbers) -> "_LanePool":
        """A copy of some lanes."""
        other = object.__new__(_LanePool)
        other._smallest_rest, other._mapped = self._smallest_rest, self._mapped
        starts, ends = self._starts[lanes], self._ends[lanes]
        other._set(self._keys[lanes], starts, ends, self._unused[lanes], self._count[lanes])
        return other

    def put(self, lanes: Numbers, other: "_LanePool") -> None:
        """Take back what `select` copied."""
        while self._slots < other._slots:
            self._grow()
        while other._slots < self._slots:
            other._grow()
        self._keys[lanes], self._starts[lanes], self._ends[lanes] = other._keys, other._starts, other._ends
        self._unused[lanes], self._count[lanes] = other._unused, other._count

    def _grow(self) -> None:
        lanes, slots = self._keys.shape
        keys = np.concatenate([self._keys, np.zeros((lanes, _MORE_SLOTS), np.int64)], axis=1)
        nowhere = np.full((lanes, _MORE_SLOTS), -1, np.int32)
        starts, ends = (np.concatenate([table, nowhere], axis=1) for table in (self._starts, self._ends))
        # below the slots that are unused already
        added = np.broadcast_to(np.arange(slots, slots + _MORE_SLOTS), nowhere.shape)
        unused = np.concatenate([added, self._unused], axis=1)
        self._set(keys, starts, ends, unused, self._count + _MORE_SLOTS)

    def find(self, size: Numbers) -> tuple[Numbers, Numbers]:
        """The place of the smallest free block that is large enough, and its key, in every lane."""
        least = size << _ADDRESS_BITS
        gaps = np.subtract(self._keys, least[:, None], out=self._gaps)
        if self._mapped:
            # the block that can grow comes last
            np.add(gaps, _LAST, out=gaps, where=(self._ends == self._mapped) & (gaps >= 0))
        # what is too small is negative, and so larger than any other number without its sign
        place = self._first + gaps.view(np.uint64).argmin(axis=1)
        key = self._flat[0][place]
        if (key < least).any():
            raise _NoRoomError(int((key < least).argmax()))
        return place, key

    def whole(self, size: Numbers, key: Numbers) -> Numbers:
        """The size of the block for a request that is found at a key."""
        found = key >> _ADDRESS_BITS
        return np.where(found - size >= self._smallest_rest, size, found)

    def take(self, place: Numbers, key: Numbers, whole: Numbers) -> Numbers:
        """Take the front of a free block; returns the address."""
        keys, starts, ends, unused = self._flat
        address, rest = key & _ADDRESSES, (key >> _ADDRESS_BITS) - whole
        behind = address + whole
        if rest.all():
            keys[place] = rest << _ADDRESS_BITS | behind
            starts[place] = behind
            return address
        stays = rest > 0
        keys[place] = np.where(stays, rest << _ADDRESS_BITS | behind, 0)
        starts[place] = np.where(stays, behind, -1)
        ends[place] = np.where(stays, ends[place], -1)
        # above the valid ones where the slot stays in use
        unused[self._first + self._count] = place - self._first
        self._count += ~stays
        return address

    def undo(self, place: Numbers, key: Numbers) -> None:
        """Undo `take`, everything since having been undone."""
        keys, starts, ends, _ = self._flat
        address = key & _ADDRESSES
        self._count -= keys[place] == 0
        keys[place], starts[place] = key, address
        ends[place] = address + (key >> _ADDRESS_BITS)

    def free(self, address: Numbers, size: Numbers) -> None:
        """Take a block back and merge it with free neighbors."""
        if not self._count.all():
            self._grow()
        keys, starts, ends, unused = self._flat
        end = address + size
        following, has_following = self._where(self._starts, end)
        before, has_before = self._where(self._ends, address)
        start = np.where(has_before, starts[before], address)
        end = np.where(has_following, ends[following], end)
        alone = ~(has_following | has_before)
        last = self._first + unused[self._first + self._count - 1]
        place = np.where(has_before, before, np.where(has_following, following, last))
        self._count -= alone
        if (both := has_following & has_before).any():
            emptied = following[both]
            keys[emptied], starts[emptied], ends[emptied] = 0, -1, -1
            first, count = self._first[both], self._count[both]
            unused[first + count] = emptied - first
            self._count += both
        keys[place] = (end - start) << _ADDRESS_BITS | start
        starts[place], ends[place] = start, end

    def _where(self, table: Places, value: Numbers) -> tuple[Numbers, npt.NDArray[np.bool_]]:
        """The place of a value in every lane, and whether it is there."""
        place = self._first + np.equal(table, value.astype(np.int32)[:, None], out=self._same).argmax(axis=1)
        return place, self._same_flat[place]


def _closed_up(view: PoolView) -> list[tuple[int, int]]:
    """The free blocks, at addresses without the space between segments; one unit is left, so that they do not touch."""
    blocks = sorted(view.free)
    if not view.segments:
        return blocks
    moved, segments = [], sorted(view.segments)
    index, origin = 0, 0
    for address, size in blocks:
        while segments[index][0] + segments[index][1] <= address:
            origin += segments[index][1] + 1
            index += 1
        moved.append((address - segments[index][0] + origin, size))
    return moved


@dataclass(frozen=True, slots=True)
class HeldBlock:
    """A block in every lane."""

    address: Numbers
    size: Numbers
    small: bool

    def select(self, lanes: Numbers) -> "HeldBlock":
        """The block in some lanes."""
        return HeldBlock(self.address[lanes], self.size[lanes], self.small)


@dataclass(frozen=True, slots=True)
class _Taken:
    """A block, with the free block that it was taken from; without an address if it is freed at once."""

    address: Numbers | None
    place: Numbers
    key: Numbers
    whole: Numbers

    def first(self, lanes: int) -> "_Taken":
        address = None if self.address is None else self.address[:lanes]
        return _Taken(address, self.place[:lanes], self.key[:lanes], self.whole[:lanes])


class Lanes:
    """Allocators that start from one state, which is not changed.

    Args:
        state: its pools' addresses and sizes must be small enough, see `can_start`.
        lanes: how many.

    Attributes:
        allocated, highest: units in blocks, now and at most, of every lane.
        held: the blocks that were allocated here and are held.
    """

    def __init__(self, state: AllocatorState, lanes: int) -> None:
        self._pools = tuple(_LanePool(view, lanes) for view in state.pools)
        self.allocated = np.full(lanes, state.allocated, np.int64)
        self.highest = self.allocated.copy()
        self.held: list[HeldBlock] = []

    @staticmethod
    def can_start(state: AllocatorState) -> bool:
        """Whether addresses and sizes are small enough."""
        return all(
            view.mapped + sum(size + 1 for _, size in view.segments) < 1 << (_ADDRESS_BITS - 2) for view in state.pools
        )

    @property
    def count(self) -> int:
        """The number of lanes."""
        return len(self.allocated)

    def select(self, lanes: Numbers) -> "Lanes":
        """A copy of some lanes."""
        other = object.__new__(Lanes)
        other._pools = tuple(pool.select(lanes) for pool in self._pools)
        other.allocated, other.highest = self.allocated[lanes], self.highest[lanes]
        other.held = [block.select(lanes) for block in self.held]
        return other

    def join(self, groups: Sequence[tuple[Numbers, "Lanes"]]) -> None:
        """Take back lanes that `select` copied, which hold as many blocks of the same pools."""
        empty = np.zeros(self.count, np.int64)
        self.held = [HeldBlock(empty.copy(), empty.copy(), block.small) for block in groups[0][1].held]
        for lanes, other in groups:
            for pool, changed in zip(self._pools, other._pools, strict=True):
                pool.put(lanes, changed)
            self.allocated[lanes], self.highest[lanes] = other.allocated, other.highest
            for block, own in zip(self.held, other.held, strict=True):
                block.address[lanes], block.size[lanes] = own.address, own.size

    def run(self, events: Events, sizes: Numbers) -> None:
        """Allocate and free in order; ends with fewer lanes if one needs another segment: those before the first.

        Args:
            sizes: units of each allocation, one row per allocation and one column per lane.
        """
        blocks: list[_Taken | None] = [None] * events.slot_count
        before: list[HeldBlock | None] = list(self.held)
        operations, slots = events.operations, events.slots
        count = 0
        for index, operation in enumerate(operations):
            if operation == 0:
                pool = self._pools[events.small[count]]
                try:
                    place, key = pool.find(sizes[count])
                except _NoRoomError as error:
                    kept = error.lane
                    self._keep(kept)
                    blocks = [block and block.first(kept) for block in blocks]
                    before = [block and block.select(np.arange(kept)) for block in before]
                    sizes = sizes[:, :kept]
                    if kept == 0:
                        return
                    pool = self._pools[events.small[count]]
                    place, key = pool.find(sizes[count])
                whole = pool.whole(sizes[count], key)
                self.allocated += whole
                np.maximum(self.highest, self.allocated, out=self.highest)
                number = count
                count += 1
                at_once = index + 1 < len(operations) and operations[index + 1] == count
                address = None if at_once else pool.take(place, key, whole)
                blocks[slots[number]] = _Taken(address, place, key, whole)
            elif operation > 0:
                number = operation - 1
                block = blocks[slots[number]]
                assert block is not None, "a block is freed after it was allocated"
                self.allocated -= block.whole
                pool = self._pools[events.small[number]]
                if block.address is None:
                    continue
                if events.undone[number]:
                    pool.undo(block.place, block.key)
                else:
                    pool.free(block.address, block.whole)
            else:
                held = before[-operation - 1]
                assert held is not None, "a block is freed once"
                before[-operation - 1] = None
                self.allocated -= held.size
                self._pools[held.small].free(held.address, held.size)
        self.held = [block for block in before if block is not None]
        for number in events.left:
            block = blocks[slots[number]]
            assert block is not None
            assert block.address is not None
            self.held.append(HeldBlock(block.address, block.whole, events.small[number]))

    def _keep(self, count: int) -> None:
        """Keep the first lanes."""
        kept = self.select(np.arange(count))
        self._pools, self.allocated, self.highest, self.held = kept._pools, kept.allocated, kept.highest, kept.held
