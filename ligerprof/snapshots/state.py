"""The state of a device at one moment: the free space in its segments, and the blocks that are not free."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple, overload

import numpy as np

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
            end += self._pop(end)
        if start in self.ends and start not in self.borders:
            start = self.ends.pop(start)
        self._put(start, end)

    def cut(self, start: int, size: int) -> bool:
        """Take `[start, start + size)` out of the free block that contains it; False if none does."""
        holder = self.around(start)
        if holder is None or start + size > holder[0] + holder[1]:
            return False
        begin, end = holder[0], holder[0] + holder[1]
        self._pop(begin)
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

    def _pop(self, start: int) -> int:
        return self.starts.pop(start)


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


class HeldBlocks(Sequence[HeldBlock]):
    """Blocks as columns, since a file can have hundreds of thousands; an entry is made on access.

    Attributes:
        addresses: of the blocks, in their order.
        frames: stack of each one's allocation.
    """

    __slots__ = ("_allocated", "_block_bytes", "_requested_bytes", "addresses", "frames")

    def __init__(self, blocks: Sequence[HeldBlock] = ()) -> None:
        self.addresses = np.array([block.address for block in blocks], dtype=np.int64)
        self._requested_bytes = np.array([block.requested_bytes for block in blocks], dtype=np.int64)
        self._block_bytes = np.array([block.block_bytes for block in blocks], dtype=np.int64)
        self._allocated = np.array([block.allocated for block in blocks], dtype=bool)
        self.frames = [block.frames for block in blocks]

    def __len__(self) -> int:
        return len(self.frames)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HeldBlocks) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    @overload
    def __getitem__(self, index: int) -> HeldBlock: ...

    @overload
    def __getitem__(self, index: slice) -> list[HeldBlock]: ...

    def __getitem__(self, index: int | slice) -> HeldBlock | list[HeldBlock]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        return HeldBlock(
            address=int(self.addresses[index]),
            requested_bytes=int(self._requested_bytes[index]),
            block_bytes=int(self._block_bytes[index]),
            allocated=bool(self._allocated[index]),
            frames=self.frames[index],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceState:
    """A device's free blocks, its other blocks by address, and the bytes of all segments."""

    space: FreeSpace = field(default_factory=FreeSpace)
    blocks: Sequence[HeldBlock] = ()
    reserved_bytes: int = 0
