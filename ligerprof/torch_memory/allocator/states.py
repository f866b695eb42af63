"""The caching allocator for long runs: the decisions of caching.py on whole numbers.

Sizes and addresses are in units of 512 bytes, the smallest block. compiled.py runs the same decisions as machine code.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

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
# segments are made downwards from here
FIRST_ADDRESS = _ADDRESSES
# requests up to here come from the small pool
SMALL_UNITS = SMALL_REQUEST_BYTES // UNIT_BYTES
# segments do not touch, so that free blocks of two segments never merge
GAP_UNITS = 1

# (address, size) of a block
_Block = tuple[int, int]
Operations = npt.NDArray[np.int32]
Sizes = npt.NDArray[np.int64]


class RunAllocator(ABC):
    """An allocator between two parts of a run.

    Args:
        settings: PYTORCH_CUDA_ALLOC_CONF.
        limit_bytes: limit on reserved bytes, or None.

    Attributes:
        limit: units of segments that fit, or None.
        allocated, reserved: units in blocks and in segments.
        highest, highest_reserved: the most of both since they were last set.

    Raises:
        UnsupportedError: settings whose effect depends on more than the free blocks.
    """

    def __init__(self, settings: AllocatorSettings, limit_bytes: int | None = None) -> None:
        rules = settings.rules
        if rules.max_split_bytes is not None or settings.garbage_collection_threshold:
            raise UnsupportedError(
                "--lengths does not go with max_split_size_mb or garbage_collection_threshold in --alloc-conf."
            )
        self._rules, self._expandable = rules, rules.expandable_segments
        # of the small and the large pool
        self._smallest_rests = (1, -(-rules.smallest_rest(SMALL_REQUEST_BYTES + 1) // UNIT_BYTES))
        self._pages = (SMALL_SEGMENT_BYTES // UNIT_BYTES, LARGE_SEGMENT_BYTES // UNIT_BYTES)
        self.limit = None if limit_bytes is None else limit_bytes // UNIT_BYTES
        self.allocated = self.reserved = self.highest = self.highest_reserved = 0

    @abstractmethod
    def run(self, operations: Operations, sizes: Sizes, name: Hashable = None) -> None:
        """Allocate and free in order.

        Args:
            operations: 0 allocates the next of `sizes`; n frees the n-th block of this run, -n the n-th block that was
                held before. At the end, blocks of this run take the places of those that were freed, then places behind
                them; places that stay empty close up (`place_left`).
            sizes: units of each allocation.
            name: of these operations and sizes; what a run of this name did to the large pool may be remembered.

        Raises:
            AllocatorFullError: an allocation does not fit the limit.
        """

    @abstractmethod
    def key(self) -> object:
        """What decides about coming events: equal for equal states."""

    def units_of(self, requested_bytes: Sizes) -> Sizes:
        """The sizes of the smallest blocks for requests."""
        if not self._rules.roundup_divisions:
            return np.maximum(-(-requested_bytes // UNIT_BYTES), 1)
        different, places = np.unique(requested_bytes, return_inverse=True)
        units = [-(-self._rules.round_request(size) // UNIT_BYTES) for size in different.tolist()]
        return np.array(units, np.int64)[places].reshape(requested_bytes.shape)

    def _refuse(self, size: int) -> None:
        assert self.limit is not None
        if self._expandable and self.allocated + size <= self.limit:
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


class AllocatorState(RunAllocator):
    """The allocator in Python."""

    def __init__(self, settings: AllocatorSettings, limit_bytes: int | None = None) -> None:
        super().__init__(settings, limit_bytes)
        self._small, self._large = (
            _Pool(rest, page) for rest, page in zip(self._smallest_rests, self._pages, strict=True)
        )
        self._next_address = FIRST_ADDRESS
        self._held: list[_Block] = []

    def key(self) -> object:
        """What decides about coming events: equal for equal states."""
        pools = (tuple(self._small.keys), tuple(self._large.keys), self._small.mapped, self._large.mapped)
        return (*pools, tuple(self._held))

    def run(self, operations: Operations, sizes: Sizes, name: Hashable = None) -> None:
        """Allocate and free in order, see `RunAllocator.run`; nothing is remembered."""
        del name
        blocks: list[_Block | None] = []
        before: list[_Block | None] = list(self._held)
        small, large = self._small, self._large
        allocated, highest = self.allocated, self.highest
        upcoming = iter(sizes.tolist())
        for operation in operations.tolist():
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
                    self.allocated, self.highest = allocated, highest
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
                address, whole = blocks[operation - 1]
                blocks[operation - 1] = None
            else:
                address, whole = before[-operation - 1]
                before[-operation - 1] = None
            allocated -= whole
            (small if whole <= SMALL_UNITS else large).free(address, whole)
        self.allocated, self.highest = allocated, highest
        self._held = place_left(before, blocks)

    def _grow(self, pool: _Pool, size: int) -> None:
        """Make a free block of at least `size`: a new segment, or more pages of the one that grows."""
        if self._expandable:
            tail = pool.ends.get(pool.mapped, pool.mapped)
            held = pool.mapped - tail
            wanted = -(-(size - held) // pool.page) * pool.page
            if not self._has_room(wanted):
                self._refuse(size)
            if held:
                pool.take(tail, held)
            pool.mapped += wanted
            pool.put(tail, held + wanted)
        else:
            wanted = segment_bytes(size * UNIT_BYTES) // UNIT_BYTES
            if not self._has_room(wanted):
                self._give_back()
            if not self._has_room(wanted):
                self._refuse(size)
            self._next_address -= wanted + GAP_UNITS
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


_Held = TypeVar("_Held")


def place_left(before: Sequence[_Held | None], own: Sequence[_Held | None]) -> list[_Held]:
    """The blocks that a run leaves held, in order; None were freed.

    A block that replaces another one takes its place, so that a micro-batch that leaves as many blocks as it freed can
    follow itself.
    """
    left = iter([block for block in own if block is not None])
    filled = [next(left, None) if block is None else block for block in before]
    return [*(block for block in filled if block is not None), *left]
