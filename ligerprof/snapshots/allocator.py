"""Decide which block an allocation gets, as torch's CUDA caching allocator does.

The rules are those of c10/cuda/CUDACachingAllocator.cpp (native backend, one device, one stream): sizes are rounded
up, small and large blocks come from pools of their own, the best fit is taken and split, freed neighbours merge, and
what fits nowhere gets a new segment.
"""

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ligerprof.snapshots.allocator_settings import AllocatorSettings
from ligerprof.snapshots.rules import SMALL_REQUEST_BYTES
from ligerprof.units import MIB

# c10/core/AllocatorConfig.h: kSmallBuffer, kLargeBuffer, kMinLargeAlloc, kRoundLarge
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
MIN_OWN_SEGMENT_BYTES = 10 * MIB
SEGMENT_ROUND_BYTES = 2 * MIB

# cudaMalloc hands out addresses downwards from about here
_TOP_ADDRESS = 0x7F_8000_000000

Observer = Callable[[str, int, int, object], None]


class AllocatorFullError(Exception):
    """An allocation that fits nowhere, also after all cached segments were given back.

    Attributes:
        requested_bytes: what was asked for.
        allocated_bytes: what blocks hold.
        reserved_bytes: what segments hold, after the retry.
        limit_bytes: the limit that stands in the way.
    """

    def __init__(self, *, requested_bytes: int, allocated_bytes: int, reserved_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"out of memory: {requested_bytes} bytes asked for, {limit_bytes - reserved_bytes} left")
        self.requested_bytes = requested_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes
        self.limit_bytes = limit_bytes


@dataclass(eq=False, kw_only=True, slots=True)
class Block:
    """A piece of a segment, allocated or free; `previous` and `next` are its neighbours there.

    Attributes:
        requested_bytes: what the holder asked for; of a free block, what its last holder asked for.
        context: what the caller gave with the allocation.
        segment_context: what the caller gave with the allocation that made the segment.
        freed_at: the pool's clock when the block was last put there.
    """

    address: int
    size_bytes: int
    pool: "_Pool"
    previous: "Block | None" = None
    next: "Block | None" = None
    allocated: bool = False
    requested_bytes: int = 0
    context: object = None
    segment_context: object = None
    freed_at: int = 0

    @property
    def is_whole_segment(self) -> bool:
        """Whether nothing else shares its segment."""
        return self.previous is None and self.next is None


@dataclass(eq=False, slots=True)
class _Pool:
    """Free blocks of one kind, sorted by (size, address)."""

    small: bool
    free: list[tuple[int, int, Block]] = field(default_factory=list)
    clock: int = 0

    def insert(self, block: Block) -> None:
        block.freed_at = self.clock
        bisect.insort(self.free, (block.size_bytes, block.address, block))

    def remove(self, block: Block) -> None:
        del self.free[bisect.bisect_left(self.free, (block.size_bytes, block.address))]

    def first_at_least(self, size_bytes: int) -> int:
        return bisect.bisect_left(self.free, (size_bytes,))


def segment_bytes(rounded_bytes: int) -> int:
    """Size of the segment that is made for a block of `rounded_bytes`."""
    if rounded_bytes <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if rounded_bytes < MIN_OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-rounded_bytes // SEGMENT_ROUND_BYTES) * SEGMENT_ROUND_BYTES


class CachingAllocator:
    """One GPU's caching allocator.

    Args:
        settings: PYTORCH_CUDA_ALLOC_CONF.
        capacity_bytes: what the device has for segments, None for no end.
        limit_bytes: set_per_process_memory_fraction's limit on reserved bytes, None for none.
        observe: is told (action, address, bytes, context) of every event, in torch's order and words.

    Attributes:
        allocated_bytes: in blocks that are held, as torch.cuda.memory_allocated() counts.
        requested_bytes: asked for by those who hold them.
        reserved_bytes: in segments.
    """

    def __init__(
        self,
        *,
        settings: AllocatorSettings | None = None,
        capacity_bytes: int | None = None,
        limit_bytes: int | None = None,
        observe: Observer | None = None,
    ) -> None:
        self._settings = settings or AllocatorSettings()
        self._rules = self._settings.size_rules
        self._capacity_bytes = capacity_bytes
        self._limit_bytes = limit_bytes
        self._observe = observe or _ignore
        self._small, self._large = _Pool(small=True), _Pool(small=False)
        self._heads: dict[int, Block] = {}
        self._next_address = _TOP_ADDRESS
        self.allocated_bytes = self.requested_bytes = self.reserved_bytes = 0
        self.reset_peaks()

    def reset_peaks(self) -> None:
        """Start new peaks from what is held now."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def malloc(self, requested_bytes: int, context: object = None) -> Block:
        """Hand out a block for `requested_bytes`, which are more than 0.

        Raises:
            AllocatorFullError: it fits nowhere.
        """
        size = self._rules.round_request(requested_bytes)
        pool = self._small if size <= SMALL_REQUEST_BYTES else self._large
        block = self._best_fit(pool, size) or self._new_segment_or_retry(pool, size, requested_bytes, context)
        self._split(block, size)
        block.allocated, block.requested_bytes, block.context = True, requested_bytes, context
        self.allocated_bytes += block.size_bytes
        self.requested_bytes += requested_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        self._observe("alloc", block.address, requested_bytes, context)
        return block

    def free(self, block: Block, context: object = None) -> None:
        """Take a block back and merge it with free neighbours."""
        self._observe("free_requested", block.address, block.requested_bytes, context)
        self._observe("free_completed", block.address, block.requested_bytes, context)
        self.allocated_bytes -= block.size_bytes
        self.requested_bytes -= block.requested_bytes
        block.allocated = False
        following = block.next
        if following is not None and not following.allocated:
            block.pool.remove(following)
            self._absorb(block, following)
        before = block.previous
        if before is not None and not before.allocated:
            block.pool.remove(before)
            self._absorb(before, block)
            block = before
        block.pool.insert(block)

    def empty_cache(self, context: object = None) -> None:
        """Give back every segment that holds nothing."""
        for pool in (self._large, self._small):
            for _, _, block in [entry for entry in pool.free if entry[2].is_whole_segment]:
                self._release(block, context)

    def segments(self) -> Iterator[list[Block]]:
        """The blocks of each segment, segments in order of address."""
        for address in sorted(self._heads):
            blocks = []
            block: Block | None = self._heads[address]
            while block is not None:
                blocks.append(block)
                block = block.next
            yield blocks

    def _best_fit(self, pool: _Pool, size: int) -> Block | None:
        pool.clock += 1
        index = pool.first_at_least(size)
        if index == len(pool.free):
            return None
        block = pool.free[index][2]
        if not self._may_serve(block, size):
            return None
        del pool.free[index]
        return block

    def _may_serve(self, block: Block, size: int) -> bool:
        limit = self._settings.max_split_bytes
        if limit is None:
            return True
        if size < limit:
            return block.size_bytes < limit
        return block.size_bytes < size + self._settings.max_non_split_rounding_bytes

    def _split(self, block: Block, size: int) -> None:
        rest = block.size_bytes - size
        if not self._rules.splits_off(size, rest):
            return
        remainder = Block(
            address=block.address + size,
            size_bytes=rest,
            pool=block.pool,
            previous=block,
            next=block.next,
            segment_context=block.segment_context,
        )
        if block.next is not None:
            block.next.previous = remainder
        block.next, block.size_bytes = remainder, size
        block.pool.insert(remainder)

    @staticmethod
    def _absorb(block: Block, following: Block) -> None:
        block.size_bytes += following.size_bytes
        block.next = following.next
        if block.next is not None:
            block.next.previous = block

    def _new_segment_or_retry(self, pool: _Pool, size: int, requested_bytes: int, context: object) -> Block:
        self._collect_garbage(context)
        wanted = segment_bytes(size)
        block = self._new_segment(pool, wanted, context)
        if block is None and self._release_oversized(pool, size, context):
            block = self._new_segment(pool, wanted, context)
        if block is None:
            self.empty_cache(context)
            block = self._new_segment(pool, wanted, context)
        if block is None:
            self._observe("oom", 0, requested_bytes, context)
            raise AllocatorFullError(
                requested_bytes=requested_bytes,
                allocated_bytes=self.allocated_bytes,
                reserved_bytes=self.reserved_bytes,
                limit_bytes=self._ceiling() or 0,
            )
        return block

    def _ceiling(self) -> int | None:
        ceilings = [bound for bound in (self._capacity_bytes, self._limit_bytes) if bound is not None]
        return min(ceilings, default=None)

    def _new_segment(self, pool: _Pool, wanted: int, context: object) -> Block | None:
        ceiling = self._ceiling()
        if ceiling is not None and self.reserved_bytes + wanted > ceiling:
            return None
        self._next_address -= wanted
        block = Block(address=self._next_address, size_bytes=wanted, pool=pool, segment_context=context)
        self._heads[block.address] = block
        self.reserved_bytes += wanted
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self._observe("segment_alloc", block.address, wanted, context)
        return block

    def _release(self, block: Block, context: object) -> None:
        block.pool.remove(block)
        del self._heads[block.address]
        self.reserved_bytes -= block.size_bytes
        self._observe("segment_free", block.address, block.size_bytes, context)

    def _release_oversized(self, pool: _Pool, size: int, context: object) -> bool:
        """Give back blocks too large to split, as release_available_cached_blocks does; True where enough went."""
        limit = self._settings.max_split_bytes
        if limit is None:
            return False
        wanted = max(size, limit)
        index = pool.first_at_least(wanted)
        if index < len(pool.free):
            self._release(pool.free[index][2], context)
            return True
        released = 0
        for block in [entry[2] for entry in reversed(pool.free) if entry[0] >= limit]:
            if released >= wanted:
                break
            self._release(block, context)
            released += block.size_bytes
        return released >= wanted

    def _collect_garbage(self, context: object) -> None:
        """Give back the older half of free large segments, as garbage_collect_cached_blocks does."""
        threshold = self._settings.garbage_collection_threshold
        if self._limit_bytes is None or threshold == 0.0:
            return
        target = self.reserved_bytes - int(threshold * self._limit_bytes)
        whole = [entry[2] for entry in self._large.free if entry[2].is_whole_segment]
        while target > 0 and whole:
            ages = [self._large.clock - block.freed_at for block in whole]
            average = sum(ages) / len(ages)
            old = [block for block, age in zip(whole, ages, strict=True) if age >= average]
            for block in old:
                self._release(block, context)
                target -= block.size_bytes
            whole = [block for block in whole if block not in old]


def _ignore(_action: str, _address: int, _size_bytes: int, _context: object) -> None:
    pass
