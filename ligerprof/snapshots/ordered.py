"""Free blocks in the order of their addresses, so that the one around an address is found without a search of all."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable

from ligerprof.snapshots.state import FreeSpace

# Python moves the entries behind a new one, which is fast in short lists
_LONGEST_CHUNK = 1024


class SortedAddresses:
    """A set of addresses in order, in chunks of bounded length."""

    __slots__ = ("_chunks", "_firsts")

    def __init__(self, addresses: Iterable[int]) -> None:
        ordered = sorted(addresses)
        starts = range(0, len(ordered), _LONGEST_CHUNK // 2)
        self._chunks = [ordered[start : start + starts.step] for start in starts] or [[]]
        self._firsts = [chunk[0] if chunk else 0 for chunk in self._chunks]

    def add(self, address: int) -> None:
        """Add an address that is not in the set."""
        place = max(0, bisect_right(self._firsts, address) - 1)
        chunk = self._chunks[place]
        insort(chunk, address)
        self._firsts[place] = chunk[0]
        if len(chunk) > _LONGEST_CHUNK:
            half = len(chunk) // 2
            self._chunks.insert(place + 1, chunk[half:])
            self._firsts.insert(place + 1, chunk[half])
            del chunk[half:]

    def remove(self, address: int) -> None:
        """Remove an address that is in the set."""
        place = bisect_right(self._firsts, address) - 1
        chunk = self._chunks[place]
        del chunk[bisect_left(chunk, address)]
        if chunk:
            self._firsts[place] = chunk[0]
        elif len(self._chunks) > 1:
            del self._chunks[place], self._firsts[place]

    def last_until(self, address: int) -> int | None:
        """The highest address in the set that is not above `address`."""
        chunk = self._chunks[max(0, bisect_right(self._firsts, address) - 1)]
        place = bisect_right(chunk, address)
        return chunk[place - 1] if place else None


class OrderedFreeSpace(FreeSpace):
    """A space that knows the order of its blocks, so that `around` is fast for any address.

    Rewinding meets addresses anywhere. Replays use the plain space: most of their allocations start where a free block
    starts, which a dict finds. The simulated allocator searches by size instead (`torch_memory/allocator/blocks.py`).
    """

    __slots__ = ("_order",)

    def __init__(self, space: FreeSpace) -> None:
        """Take over a space, which must not be used any more."""
        super().__init__()
        self.starts, self.ends, self.borders = space.starts, space.ends, space.borders
        self._order = SortedAddresses(self.starts)

    def unordered(self) -> FreeSpace:
        """The same blocks as a plain space, which takes them over."""
        plain = FreeSpace()
        plain.starts, plain.ends, plain.borders = self.starts, self.ends, self.borders
        return plain

    def around(self, address: int) -> tuple[int, int] | None:
        """Start and size of the free block that contains `address`."""
        size = self.starts.get(address)
        if size is not None:
            return address, size
        start = self._order.last_until(address)
        return None if start is None or start + self.starts[start] <= address else (start, self.starts[start])

    def _put(self, start: int, end: int) -> None:
        if start not in self.starts:
            self._order.add(start)
        super()._put(start, end)

    def _pop(self, start: int) -> int:
        self._order.remove(start)
        return super()._pop(start)
