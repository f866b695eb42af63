"""Decide which block an allocation gets, as torch's CUDA caching allocator does.

The rules are those of c10/cuda/CUDACachingAllocator.cpp (native backend, one device): sizes are rounded up, small and
large blocks come from pools of their own, the best fit is taken and split, freed neighbours merge, and what fits
nowhere gets a new segment, after a retry without what is cached. Each CUDA stream has its own pools: a free block
serves only the stream that it was allocated on. A block is freed when its holder frees it, as without `record_stream`.
"""

from collections.abc import Callable, Hashable, Iterator

from ligerprof.torch_memory.allocator.blocks import Block, Pool
from ligerprof.torch_memory.allocator.expandable import ExpandableSegment
from ligerprof.torch_memory.allocator.settings import AllocatorSettings
from ligerprof.torch_memory.allocator.sizes import SMALL_REQUEST_BYTES
from ligerprof.units import MIB

# c10/core/AllocatorConfig.h: kSmallBuffer, large_segment_size, kMinLargeAlloc, kRoundLarge
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
        observe: callback invoked with (action, address, bytes, context) for each event, in torch's order and words.

    Attributes:
        allocated_bytes: in blocks that are held, as torch.cuda.memory_allocated() counts.
        requested_bytes: asked for by those who hold them.
        reserved_bytes: in segments.
        highest_allocated_bytes: the most that was ever allocated.
        highest_reserved_bytes: the most that was ever reserved.
        place: where the driver places a segment of so many bytes; by default below all others.
        retries: how often all cached segments were given back to make room.
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
        self._capacity_bytes = capacity_bytes
        self.set_limit(limit_bytes)
        self._observe = observe or _ignore
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._heads: dict[int, Block] = {}
        self._next_address = _TOP_ADDRESS
        self.place: Callable[[int], int] = self._below
        self._expandable: dict[tuple[int, bool], ExpandableSegment] = {}
        self.allocated_bytes = self.requested_bytes = self.reserved_bytes = 0
        self.highest_allocated_bytes = self.highest_reserved_bytes = self.retries = 0
        self.reset_peaks()

    def _pool(self, stream: int, *, small: bool) -> Pool:
        key = (stream, small)
        if key not in self._pools:
            pool = self._pools[key] = Pool(small=small, stream=stream)
            if self._settings.rules.expandable_segments:
                page_bytes = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
                self._expandable[key] = ExpandableSegment(pool, page_bytes=page_bytes, account=self._account)
        return self._pools[key]

    def _segment_of(self, pool: Pool) -> ExpandableSegment | None:
        return self._expandable.get((pool.stream, pool.small))

    def set_limit(self, limit_bytes: int | None) -> None:
        """Set the limit of set_per_process_memory_fraction, in bytes; None removes it."""
        bounds = (self._capacity_bytes, limit_bytes)
        self._ceiling = min((bound for bound in bounds if bound is not None), default=None)
        self._limit_bytes = limit_bytes

    def reset_peaks(self) -> None:
        """Start new peaks from what is held now."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def room_bytes(self) -> int:
        """What can still be reserved under capacity and limit; a very large number without either."""
        return (1 << 62) if self._ceiling is None else self._ceiling - self.reserved_bytes

    def malloc(self, requested_bytes: int, context: object = None, *, stream: int = 0) -> Block:
        """Hand out a block of a stream for `requested_bytes`, which are more than 0.

        Raises:
            AllocatorFullError: it fits nowhere.
        """
        size = self._settings.rules.round_request(requested_bytes)
        pool = self._pool(stream, small=size <= SMALL_REQUEST_BYTES)
        block = self._best_fit(pool, size) or self._new_block_or_retry(pool, size, requested_bytes, context)
        rest = block.size_bytes - size
        if self._settings.rules.splits_off(size, rest):
            pool.insert(block.split(size))
        block.allocated, block.requested_bytes, block.context = True, requested_bytes, context
        self.allocated_bytes += block.size_bytes
        self.requested_bytes += requested_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        self.highest_allocated_bytes = max(self.highest_allocated_bytes, self.allocated_bytes)
        self._observe("alloc", block.address, requested_bytes, context)
        return block

    def free(self, block: Block, context: object = None) -> None:
        """Take a block back and merge it with free neighbours."""
        self._observe("free_requested", block.address, block.requested_bytes, context)
        self._observe("free_completed", block.address, block.requested_bytes, context)
        self.allocated_bytes -= block.size_bytes
        self.requested_bytes -= block.requested_bytes
        block.allocated = False
        block.pool.insert(block.pool.merged(block))

    def empty_cache(self, context: object = None) -> None:
        """Give back every segment that holds nothing, and free pages of expandable ones."""
        for pool in sorted(self._pools.values(), key=lambda pool: (pool.small, pool.stream)):
            if (segment := self._segment_of(pool)) is not None:
                segment.unmap_free_pages(context)
            else:
                for _, _, block in [entry for entry in pool.free if entry[2].is_whole_segment]:
                    self._release(block, context)

    def segments(self) -> Iterator[list[Block]]:
        """The mapped blocks of each segment, segments in order of address."""
        for head in sorted((*self._heads.values(), *self._expandable_heads()), key=lambda block: block.address):
            blocks = [head]
            while (following := blocks[-1].next) is not None and following.mapped:
                blocks.append(following)
            yield blocks

    def state(self) -> Hashable:
        """What decides about coming events: equal for equal states."""
        blocks = tuple((b.address, b.size_bytes, b.allocated) for segment in self.segments() for b in segment)
        # garbage collection looks at ages
        collects = self._settings.garbage_collection_threshold > 0
        return blocks, tuple(pool.clock for pool in self._pools.values() if collects)

    def _expandable_heads(self) -> Iterator[Block]:
        for segment in self._expandable.values():
            yield from segment.heads()

    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        pool.clock += 1
        index = pool.first_at_least(size)
        if self._expandable:
            index = pool.skip_to_less_room(index)
        if index == len(pool.free):
            return None
        block = pool.free[index][2]
        if not self._may_serve(block, size):
            return None
        del pool.free[index]
        return block

    def _may_serve(self, block: Block, size: int) -> bool:
        limit = self._settings.rules.max_split_bytes
        if limit is None:
            return True
        if size < limit:
            return block.size_bytes < limit
        return block.size_bytes < size + self._settings.max_non_split_rounding_bytes

    def _new_block_or_retry(self, pool: Pool, size: int, requested_bytes: int, context: object) -> Block:
        self._collect_garbage(context)
        block = self._new_block(pool, size, context)
        if block is None and self._release_oversized(pool, size, context):
            block = self._new_block(pool, size, context)
        if block is None:
            self.retries += 1
            self.empty_cache(context)
            block = self._new_block(pool, size, context)
        if block is None:
            # in place of an address torch says what the device has left
            self._observe("oom", (self._ceiling or 0) - self.reserved_bytes, requested_bytes, context)
            raise AllocatorFullError(
                requested_bytes=requested_bytes,
                allocated_bytes=self.allocated_bytes,
                reserved_bytes=self.reserved_bytes,
                limit_bytes=self._ceiling or 0,
            )
        return block

    def _new_block(self, pool: Pool, size: int, context: object) -> Block | None:
        wanted = segment_bytes(size)
        if not self._has_room(wanted):
            return None
        if (segment := self._segment_of(pool)) is not None:
            return segment.grow(size, context)
        block = Block(address=self.place(wanted), size_bytes=wanted, pool=pool, segment_context=context)
        self._heads[block.address] = block
        self._account("segment_alloc", block.address, wanted, context)
        return block

    def _below(self, size_bytes: int) -> int:
        self._next_address -= size_bytes
        return self._next_address

    def _has_room(self, wanted: int) -> bool:
        return self._ceiling is None or self.reserved_bytes + wanted <= self._ceiling

    def _account(self, action: str, address: int, size: int, context: object) -> bool:
        """Count memory that comes from or goes to the driver; False where there is none left."""
        if action in ("segment_alloc", "segment_map"):
            if not self._has_room(size):
                return False
            self.reserved_bytes += size
            self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
            self.highest_reserved_bytes = max(self.highest_reserved_bytes, self.reserved_bytes)
        else:
            self.reserved_bytes -= size
        self._observe(action, address, size, context)
        return True

    def _release(self, block: Block, context: object) -> None:
        block.pool.remove(block)
        del self._heads[block.address]
        self._account("segment_free", block.address, block.size_bytes, context)

    def _release_oversized(self, pool: Pool, size: int, context: object) -> bool:
        """Give back blocks too large to split, as release_available_cached_blocks does; True where enough went."""
        limit = self._settings.rules.max_split_bytes
        if limit is None or self._expandable:
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
        if self._limit_bytes is None or threshold == 0.0 or self._expandable:
            return
        target = self.reserved_bytes - int(threshold * self._limit_bytes)
        large = [pool for pool in self._pools.values() if not pool.small]
        whole = [entry[2] for pool in large for entry in pool.free if entry[2].is_whole_segment]
        while target > 0 and whole:
            ages = [block.pool.clock - block.freed_at for block in whole]
            average = sum(ages) / len(ages)
            kept = []
            for block, age in zip(whole, ages, strict=True):
                if age < average:
                    kept.append(block)
                    continue
                self._release(block, context)
                target -= block.size_bytes
            whole = kept


def _ignore(_action: str, _address: int, _size_bytes: int, _context: object) -> None:
    pass
