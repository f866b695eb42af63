"""Blocks of the caching allocator's segments, and the pools of free blocks."""

import bisect
from dataclasses import dataclass, field


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

    def first_at_least(self, size_bytes: int) -> int:
        """Index of the smallest free block of at least `size_bytes`, the lowest of its size."""
        return bisect.bisect_left(self.free, (size_bytes,))

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
