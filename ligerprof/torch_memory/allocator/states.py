"""The caching allocator for long runs: the decisions of caching.py on whole numbers, in states that can be kept.

A run of thousands of steps comes back to few states of the allocator. A state consists of numbers, so that a run copies
it, compares it and goes on from it. Sizes and addresses are in units of 512 bytes, the smallest block.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ligerprof.errors import UnsupportedError
from ligerprof.torch_memory.allocator.caching import (
    LARGE_SEGMENT_BYTES,
    SMALL_SEGMENT_BYTES,
    AllocatorFullError,
    segment_bytes,
)
from ligerprof.torch_memory.allocator.settings import AllocatorSettings
from ligerprof.torch_memory.allocator.sizes import MIN_BLOCK_BYTES, SMALL_REQUEST_BYTES

UNIT_BYTES = MIN_BLOCK_BYTES
_ADDRESS_BITS = 40
_ADDRESSES = (1 << _ADDRESS_BITS) - 1
# requests up to here come from the small pool
SMALL_UNITS = SMALL_REQUEST_BYTES // UNIT_BYTES
# segments do not touch, so that free blocks of two segments never merge
_GAP_UNITS = 1

# (address, size) of a block
Block = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolView:
    """The free blocks of a pool, in units.

    Attributes:
        smallest_rest: the least that is split off.
        free: the free blocks.
        segments: the segments that they are part of; empty if segments are expandable.
        mapped: the end of the expandable segment, which begins at 0; 0 if there is none.
    """

    smallest_rest: int
    free: tuple[Block, ...]
    segments: tuple[Block, ...]
    mapped: int


@dataclass(slots=True)
class _Pool:
    """Free blocks: sorted numbers of size and address, and the same by start and by end."""

    smallest_rest: int
    page: int
    keys: list[int] = field(default_factory=list)
    starts: dict[int, int] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    segments: dict[int, int] = field(default_factory=dict)
    mapped: int = 0

    def copy(self) -> "_Pool":
        return _Pool(
            self.smallest_rest,
            self.page,
            self.keys.copy(),
            self.starts.copy(),
            self.ends.copy(),
            self.segments.copy(),
            self.mapped,
        )

    @property
    def view(self) -> PoolView:
        return PoolView(
            smallest_rest=self.smallest_rest,
            free=tuple(self.starts.items()),
            segments=tuple(self.segments.items()),
            mapped=self.mapped,
        )

    def put(self, address: int, size: int) -> None:
        insort(self.keys, size << _ADDRESS_BITS | address)
        self.starts[address] = size
        self.ends[address + size] = address

    def take(self, address: int, size: int) -> None:
        del self.keys[bisect_left(self.keys, size << _ADDRESS_BITS | address)]
        del self.starts[address], self.ends[address + size]

    def free(self, address: int, size: int) -> None:
        """Take a block back and merge it with free neighbors."""
        following = self.starts.get(address + size)
        if following is not None:
            self.take(address + size, following)
            size += following
        before = self.ends.get(address)
        if before is not None:
            self.take(before, address - before)
            address, size = before, size + address - before
        self.put(address, size)


class AllocatorState:
    """An allocator between two events.

    Args:
        settings: PYTORCH_CUDA_ALLOC_CONF.
        limit_bytes: limit on reserved bytes, or None.

    Attributes:
        allocated, reserved: units in blocks and in segments.
        highest, highest_reserved: the most of both since they were last set.

    Raises:
        UnsupportedError: settings whose effect depends on more than the free blocks.
    """

    __slots__ = (
        *("_expandable", "_large", "_next_address", "_settings", "_small"),
        *("allocated", "highest", "highest_reserved", "limit", "reserved"),
    )

    def __init__(self, settings: AllocatorSettings, limit_bytes: int | None = None) -> None:
        rules = settings.rules
        if rules.max_split_bytes is not None or settings.garbage_collection_threshold:
            raise UnsupportedError(
                "--lengths does not go with max_split_size_mb or garbage_collection_threshold in --alloc-conf."
            )
        self._settings, self._expandable = settings, rules.expandable_segments
        rests = (1, -(-rules.smallest_rest(SMALL_REQUEST_BYTES + 1) // UNIT_BYTES))
        self._small, self._large = (
            _Pool(rest, page // UNIT_BYTES)
            for rest, page in zip(rests, (SMALL_SEGMENT_BYTES, LARGE_SEGMENT_BYTES), strict=True)
        )
        self._next_address = _ADDRESSES
        self.limit = None if limit_bytes is None else limit_bytes // UNIT_BYTES
        self.allocated = self.reserved = self.highest = self.highest_reserved = 0

    def copy(self) -> "AllocatorState":
        """The same state, to go on from."""
        other = object.__new__(AllocatorState)
        other._settings, other._expandable = self._settings, self._expandable
        other._small, other._large = self._small.copy(), self._large.copy()
        other._next_address, other.limit = self._next_address, self.limit
        other.allocated, other.reserved = self.allocated, self.reserved
        other.highest, other.highest_reserved = self.highest, self.highest_reserved
        return other

    @property
    def key(self) -> tuple[object, ...]:
        """What decides about coming events, besides the blocks that are held."""
        return (tuple(self._small.keys), tuple(self._large.keys), self._small.mapped, self._large.mapped)

    @property
    def pools(self) -> tuple[PoolView, PoolView]:
        """The large and the small pool."""
        return self._large.view, self._small.view

    def units(self, requested_bytes: int) -> int:
        """The size of the smallest block for a request."""
        return -(-self._settings.rules.round_request(requested_bytes) // UNIT_BYTES)

    def units_of(self, requested_bytes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The same for many requests."""
        if not self._settings.rules.roundup_divisions:
            return np.maximum(-(-requested_bytes // UNIT_BYTES), 1)
        different, places = np.unique(requested_bytes, return_inverse=True)
        units = np.array([self.units(size) for size in different.tolist()], np.int64)
        return units[places].reshape(requested_bytes.shape)

    def run(self, operations: Sequence[int], sizes: Sequence[int], held: Sequence[Block]) -> list[Block]:
        """Allocate and free in order.

        Args:
            operations: 0 allocates the next of `sizes`; n frees the n-th block of this run, -n the n-th of `held`.
            sizes: units of each allocation.
            held: blocks from before.

        Returns:
            the blocks that are held at the end, those of `held` first.

        Raises:
            AllocatorFullError: an allocation does not fit the limit.
        """
        blocks: list[Block | None] = []
        before: list[Block | None] = list(held)
        small, large = self._small, self._large
        allocated, highest = self.allocated, self.highest
        upcoming = iter(sizes)
        for operation in operations:
            if operation == 0:
                size = next(upcoming)
                pool = small if size <= SMALL_UNITS else large
                keys = pool.keys
                index = bisect_left(keys, size << _ADDRESS_BITS)
                if self._expandable and index + 1 < len(keys):
                    # the last block of the segment can grow: torch prefers one that cannot
                    candidate = keys[index]
                    if (candidate & _ADDRESSES) + (candidate >> _ADDRESS_BITS) == pool.mapped:
                        index += 1
                if index == len(keys):
                    self.allocated = allocated
                    self._grow(pool, size)
                    index = bisect_left(keys, size << _ADDRESS_BITS)
                key = keys.pop(index)
                address, whole = key & _ADDRESSES, key >> _ADDRESS_BITS
                del pool.starts[address]
                rest = whole - size
                if rest >= pool.smallest_rest:
                    behind = address + size
                    insort(keys, rest << _ADDRESS_BITS | behind)
                    pool.starts[behind] = rest
                    pool.ends[behind + rest] = behind
                    whole = size
                else:
                    del pool.ends[address + whole]
                blocks.append((address, whole))
                allocated += whole
                highest = max(highest, allocated)
                continue
            if operation > 0:
                address, whole = blocks[operation - 1]  # type: ignore[misc]
                blocks[operation - 1] = None
            else:
                address, whole = before[-operation - 1]  # type: ignore[misc]
                before[-operation - 1] = None
            allocated -= whole
            (small if whole <= SMALL_UNITS else large).free(address, whole)
        self.allocated, self.highest = allocated, highest
        return [block for block in (*before, *blocks) if block is not None]

    def _grow(self, pool: _Pool, size: int) -> None:
        """Make a free block of at least `size`: a new segment, or more pages of the one that grows."""
        if self._expandable:
            tail = pool.ends.get(pool.mapped, pool.mapped)
            held = pool.mapped - tail
            wanted = -(-(size - held) // pool.page) * pool.page
            if not self._has_room(wanted):
                self._refuse(size, pages=True)
            if held:
                pool.take(tail, held)
            pool.mapped += wanted
            pool.put(tail, held + wanted)
        else:
            wanted = segment_bytes(size * UNIT_BYTES) // UNIT_BYTES
            if not self._has_room(wanted):
                self._give_back()
            if not self._has_room(wanted):
                self._refuse(size, pages=False)
            self._next_address -= wanted + _GAP_UNITS
            pool.segments[self._next_address] = wanted
            pool.put(self._next_address, wanted)
        self.reserved += wanted
        self.highest_reserved = max(self.highest_reserved, self.reserved)

    def _has_room(self, wanted: int) -> bool:
        return self.limit is None or self.reserved + wanted <= self.limit

    def _give_back(self) -> None:
        """Give back every segment that holds nothing."""
        for pool in (self._large, self._small):
            for address, size in list(pool.segments.items()):
                if pool.starts.get(address) == size:
                    pool.take(address, size)
                    del pool.segments[address]
                    self.reserved -= size

    def _refuse(self, size: int, *, pages: bool) -> None:
        assert self.limit is not None
        if pages and self.allocated + size <= self.limit:
            raise UnsupportedError(
                "--lengths: under this limit torch gives back free pages of expandable segments, which is not covered."
                " Raise --memory-limit, or leave expandable_segments out."
            )
        raise AllocatorFullError(
            requested_bytes=size * UNIT_BYTES,
            allocated_bytes=self.allocated * UNIT_BYTES,
            reserved_bytes=self.reserved * UNIT_BYTES,
            limit_bytes=self.limit * UNIT_BYTES,
        )
