"""Segments that grow: address space for all of a pool, with memory mapped behind it page by page.

c10/cuda/CUDACachingAllocator.cpp: ExpandableSegment, find_expandable_block, map_block, unmap_block.
"""

from collections.abc import Callable, Iterator

from ligerprof.torch_memory.allocator.blocks import Block, Pool

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
