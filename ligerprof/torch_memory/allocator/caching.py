"""Decide which block an allocation gets, as torch's CUDA caching allocator does.

The rules are those of c10/cuda/CUDACachingAllocator.cpp (native backend, one device): sizes are rounded up, small and
large blocks come from pools of their own, the best fit is taken and split, freed neighbours merge, and what fits
nowhere gets a new segment, after a retry without what is cached. Each CUDA stream has its own pools: a free block
serves only the stream that it was allocated on. A block is freed when its holder frees it, as without `record_stream`.
Expandable segments have address space for all of a pool, with memory mapped behind it page by page.
"""

import bisect
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

from ligerprof.torch_memory.allocator.settings import SMALL_REQUEST_BYTES, AllocatorSettings
from ligerprof.units import MIB


@dataclass(eq=False, kw_only=True, slots=True)
class Block:
    """A piece of a segment; `previous` and `next` are its neighbours there.

    Attributes:
        mapped: False for address space of an expandable segment that has no memory behind it.
        requested_bytes: what the holder asked for; of a free block, what its last holder asked for.
        context: what the caller gave with the allocation.
        segment_context: what the caller gave with the allocation that made the segment.
        freed_at: the pool's clock when the block was last put there.
    """

    address: int
    size_bytes: int
    pool: "Pool"
    previous: "Block | None" = None
    next: "Block | None" = None
    allocated: bool = False
    mapped: bool = True
    requested_bytes: int = 0
    context: object = None
    segment_context: object = None
    freed_at: int = 0

    @property
    def is_whole_segment(self) -> bool:
        """Whether nothing else shares its segment."""
        return self.previous is None and self.next is None

    @property
    def room_bytes(self) -> int:
        """Its size and what could be mapped behind it."""
        following = self.next
        return self.size_bytes + (following.size_bytes if following is not None and not following.mapped else 0)

    def split(self, size_bytes: int) -> "Block":
        """Keep the first `size_bytes`, and return the remainder as a new block."""
        rest = Block(
            address=self.address + size_bytes,
            size_bytes=self.size_bytes - size_bytes,
            pool=self.pool,
            previous=self,
            next=self.next,
            mapped=self.mapped,
            segment_context=self.segment_context,
        )
        if self.next is not None:
            self.next.previous = rest
        self.next, self.size_bytes = rest, size_bytes
        return rest

    def absorb_next(self) -> None:
        """Take the next block in."""
        following = self.next
        if following is None:
            return
        self.size_bytes += following.size_bytes
        self.next = following.next
        if self.next is not None:
            self.next.previous = self


@dataclass(eq=False, slots=True)
class Pool:
    """Free blocks of one kind.

    Attributes:
        free: mapped ones, sorted by (size, address).
        unmapped: those without memory, by address.
        clock: how often a block was looked for.
        stream: the CUDA stream that allocates from it.
    """

    small: bool
    stream: int = 0
    free: list[tuple[int, int, Block]] = field(default_factory=list)
    unmapped: dict[int, Block] = field(default_factory=dict)
    clock: int = 0

    def insert(self, block: Block) -> None:
        """Put a free block in."""
        if not block.mapped:
            self.unmapped[block.address] = block
            return
        block.freed_at = self.clock
        bisect.insort(self.free, (block.size_bytes, block.address, block))

    def remove(self, block: Block) -> None:
        """Take a free block out."""
        if not block.mapped:
            del self.unmapped[block.address]
            return
        del self.free[bisect.bisect_left(self.free, (block.size_bytes, block.address))]

    def skip_to_less_room(self, index: int) -> int:
        """Go on while the next block has less room to grow, as get_free_block does in expandable segments."""
        while index + 1 < len(self.free) and self.free[index + 1][2].room_bytes < self.free[index][2].room_bytes:
            index += 1
        return index

    def merged(self, block: Block) -> Block:
        """Merge a block that is in no pool with its free neighbours of the same kind, which leave the pool."""
        before, following = block.previous, block.next
        if following is not None and not following.allocated and following.mapped == block.mapped:
            self.remove(following)
            block.absorb_next()
        if before is not None and not before.allocated and before.mapped == block.mapped:
            self.remove(before)
            before.absorb_next()
            return before
        return block


# torch reserves 9/8 of the device's memory for each; here it has no end that a run could reach
_SPACE_BYTES = 2**44
_SMALL_ADDRESS = 0x10_0000_000000
_LARGE_ADDRESS = 0x40_0000_000000
# of the segments of streams other than the default one
_STREAMS_ADDRESS = 0x60_0000_000000


class ExpandableSegment:
    """One pool's segment.

    Args:
        pool: whose blocks it holds.
        page_bytes: what is mapped at once.
        account: callback invoked with (action, address, bytes, context) for pages to map or unmap; False refuses.
    """

    def __init__(self, pool: Pool, *, page_bytes: int, account: Callable[[str, int, int, object], bool]) -> None:
        self._pool, self._page_bytes, self._account = pool, page_bytes, account
        self._origin = _SMALL_ADDRESS if pool.small else _LARGE_ADDRESS
        if pool.stream:
            self._origin = _STREAMS_ADDRESS + (2 * pool.stream + (not pool.small)) * _SPACE_BYTES
        self._first = Block(address=self._origin, size_bytes=_SPACE_BYTES, pool=pool, mapped=False)
        pool.insert(self._first)

    def heads(self) -> Iterator[Block]:
        """The first block of each stretch that has memory."""
        block: Block | None = self._first
        while block is not None:
            if block.mapped and (block.previous is None or not block.previous.mapped):
                yield block
            block = block.next

    def grow(self, size: int, context: object) -> Block | None:
        """Map what `size` bytes at the lowest place need; None where memory runs out."""
        candidate: Block | None = self._find(size)
        if candidate is not None and not candidate.mapped:
            candidate = self._map(candidate, min(candidate.size_bytes, size), context)
        while candidate is not None and candidate.size_bytes < size and candidate.next is not None:
            missing = size - candidate.size_bytes
            candidate = self._map(candidate.next, min(missing, candidate.next.size_bytes), context)
        if candidate is not None:
            self._pool.remove(candidate)
        return candidate

    def unmap_free_pages(self, context: object) -> None:
        """Give back the whole pages of every free block."""
        for _, _, block in list(self._pool.free):
            self._unmap(block, context)

    def _find(self, size: int) -> Block | None:
        for address in sorted(self._pool.unmapped):
            block = self._pool.unmapped[address]
            # a free block right before can be used too
            if block.previous is not None and not block.previous.allocated:
                block = block.previous
            if _free_from(block, size) >= size:
                return block
        return None

    def _map(self, block: Block, size: int, context: object) -> Block | None:
        mapped_bytes = -(-size // self._page_bytes) * self._page_bytes
        address = block.address
        if not self._account("segment_map", address, mapped_bytes, context):
            return None
        self._pool.remove(block)
        if mapped_bytes < block.size_bytes:
            self._pool.insert(block.split(mapped_bytes))
        block.mapped, block.segment_context = True, context
        block = self._pool.merged(block)
        self._pool.insert(block)
        return block

    def _unmap(self, block: Block, context: object) -> None:
        # pages are counted from the segment's beginning
        offset = block.address - self._origin
        start = self._origin + -(-offset // self._page_bytes) * self._page_bytes
        end = self._origin + (offset + block.size_bytes) // self._page_bytes * self._page_bytes
        if end <= start:
            return
        self._pool.remove(block)
        if start > block.address:
            rest = block.split(start - block.address)
            self._pool.insert(block)
            block = rest
        if block.address + block.size_bytes > end:
            self._pool.insert(block.split(end - start))
        block.mapped = False
        self._pool.insert(self._pool.merged(block))
        self._account("segment_unmap", start, end - start, context)


def _free_from(block: Block, wanted: int) -> int:
    """Bytes of free and unmapped blocks in a row, counted up to `wanted`."""
    total = 0
    following: Block | None = block
    while following is not None and not following.allocated and total < wanted:
        total += following.size_bytes
        following = following.next
    return total


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


_FIRST_ADDRESS = 0x7F_8000_000000 - 2 * MIB
_STEP_BYTES = 32 * MIB
# distances from the first segment, in which the libraries' own memory lies, too
_UPPER_GAP = (_FIRST_ADDRESS + 74 * MIB, _FIRST_ADDRESS + 98 * MIB)
_LOWER_GAP = (_FIRST_ADDRESS - 340 * MIB, _FIRST_ADDRESS)
_LOWEST_ADDRESS = _FIRST_ADDRESS - 414 * MIB


class Gap:
    """Free addresses, taken from the lowest on."""

    def __init__(self, begin: int, end: int) -> None:
        self._next, self._end = begin, end

    def place(self, size_bytes: int) -> int | None:
        """The address of a segment, None if it is too large."""
        if self._next + size_bytes > self._end:
            return None
        self._next += size_bytes
        return self._next - size_bytes


class Addresses:
    """Where CUDA's driver places new segments, which decides between free blocks of one size.

    As seen in 23 programs on an H200 (CUDA 13): two gaps near the context are filled upwards, the larger one as soon as
    kernels have run, since loading them moves what was there. Other segments go below all earlier ones, each at a
    multiple of 32 MiB, or into what these leave. In six programs with bitsandbytes, its library was in the larger gap.

    Attributes:
        kernels_ran: whether the program has computed anything on the GPU.
        library_in_gap: whether a library, such as bitsandbytes', is in the larger gap.
    """

    def __init__(
        self, *, library_in_gap: Callable[[], bool] = lambda: False, segments_before_kernels: int | None = None
    ) -> None:
        self.kernels_ran, self.library_in_gap = False, library_in_gap
        self._segments_before_kernels = segments_before_kernels
        self._first = Gap(_FIRST_ADDRESS, _FIRST_ADDRESS + SMALL_SEGMENT_BYTES)
        self._upper, self._lower = Gap(*_UPPER_GAP), Gap(*_LOWER_GAP)
        self._rests: list[Gap] = []
        self._lowest = _LOWEST_ADDRESS

    def place(self, size_bytes: int) -> int:
        """The address of a new segment."""
        if self._segments_before_kernels is not None:
            self.kernels_ran |= self._segments_before_kernels == 0
            self._segments_before_kernels -= 1
        first = [self._first] if size_bytes == SMALL_SEGMENT_BYTES else []
        # each rest is smaller than a step
        gaps = [*first, *(reversed(self._rests) if size_bytes < _STEP_BYTES else ())]
        if not self.kernels_ran:
            gaps.append(self._upper)
        elif not self.library_in_gap():
            gaps.append(self._lower)
        found = (gap.place(size_bytes) for gap in gaps)
        address = next((address for address in found if address is not None), None)
        if address is None:
            end = self._lowest
            address = self._lowest = (end - size_bytes) // _STEP_BYTES * _STEP_BYTES
            self._rests.append(Gap(address + size_bytes, end))
        return address


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
        self._observe = observe
        self._pools: dict[tuple[int, bool], Pool] = {}
        # of each request: its block, and the rest that it leaves to others
        self._sizes: dict[int, tuple[int, int]] = {}
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
        if (sizes := self._sizes.get(requested_bytes)) is None:
            size = self._settings.rules.round_request(requested_bytes)
            sizes = self._sizes[requested_bytes] = size, self._settings.rules.smallest_rest(size)
        size, smallest_rest = sizes
        small = size <= SMALL_REQUEST_BYTES
        pool = self._pools.get((stream, small)) or self._pool(stream, small=small)
        block = self._best_fit(pool, size) or self._new_block_or_retry(pool, size, requested_bytes, context)
        if block.size_bytes - size >= smallest_rest:
            pool.insert(block.split(size))
        block.allocated, block.requested_bytes, block.context = True, requested_bytes, context
        self.allocated_bytes += block.size_bytes
        self.requested_bytes += requested_bytes
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
            self.highest_allocated_bytes = max(self.highest_allocated_bytes, self.allocated_bytes)
        if self._observe is not None:
            self._observe("alloc", block.address, requested_bytes, context)
        return block

    def free(self, block: Block, context: object = None) -> None:
        """Take a block back and merge it with free neighbours."""
        if self._observe is not None:
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
        expandable = (head for segment in self._expandable.values() for head in segment.heads())
        for head in sorted((*self._heads.values(), *expandable), key=lambda block: block.address):
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

    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        pool.clock += 1
        free, limit = pool.free, self._settings.rules.max_split_bytes
        index = bisect.bisect_left(free, (size,))
        if self._expandable:
            index = pool.skip_to_less_room(index)
        if index == len(free):
            return None
        block = free[index][2]
        # large blocks serve large requests alone, of about their size
        most = limit if limit is not None and size < limit else size + self._settings.max_non_split_rounding_bytes
        if limit is not None and block.size_bytes >= most:
            return None
        del free[index]
        return block

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
            if self._observe is not None:
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
        if self._observe is not None:
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
        index = bisect.bisect_left(pool.free, (wanted,))
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
