"""The state of a device at one moment: the free space in its segments, and the blocks that are not free."""

import itertools
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

from ligerprof.errors import SnapshotFormatError
from ligerprof.snapshots.events import ADDRESS_LIMIT, SIZE_LIMIT
from ligerprof.text import short_repr

_ALLOCATED = "active_allocated"
# active_pending_free, active_awaiting_free: waiting for another stream
_HELD = "active"
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

    def copy(self) -> "FreeSpace":
        """An independent copy."""
        twin = FreeSpace()
        twin.starts, twin.ends, twin.borders = dict(self.starts), dict(self.ends), set(self.borders)
        return twin

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
        held: False if it is free.
        requested_bytes: the program's request.
        allocated: False if it waits for another stream, which torch no longer counts as allocated.
        frames: the stack of its allocation, as in the file.
    """

    address: int
    requested_bytes: int
    block_bytes: int
    held: bool = True
    allocated: bool = True
    frames: Any = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceState:
    """A device's free blocks, its other blocks by address, and the bytes of all segments."""

    space: FreeSpace = field(default_factory=FreeSpace)
    blocks: Mapping[int, HeldBlock] = field(default_factory=dict)
    reserved_bytes: int = 0

    @classmethod
    def from_segments(cls, segments: Sequence[Mapping[str, Any]], where: str) -> "DeviceState":
        """Read the `segments` of a snapshot.

        Raises:
            SnapshotFormatError: a value is not a block, or an address or size is not a number in range.
        """
        space = FreeSpace()
        starts: list[Any] = [segment.get("address") for segment in segments]
        sizes: list[Any] = [segment.get("total_size") for segment in segments]
        _require_numbers(starts, ADDRESS_LIMIT, f"{where}: a segment's address")
        _require_numbers(sizes, SIZE_LIMIT, f"{where}: a segment's total_size")
        # ranges of one expandable segment merge once the memory between them is mapped
        fixed = [segment.get("is_expandable") is not True for segment in segments]
        space.borders.update(itertools.compress(starts, fixed))
        blocks = _blocks(segments, starts, where)
        for block in blocks:
            if not block.held and block.block_bytes:
                space.give(block.address, block.block_bytes)
        held = {block.address: block for block in blocks if block.held}
        return cls(space=space, blocks=held, reserved_bytes=sum(sizes))


def _require_numbers(values: Sequence[Any], limit: int, what: str) -> None:
    """Raise a SnapshotFormatError that names the first value that is not an integer in [0, limit)."""
    if set(map(type, values)) <= {int} and (not values or (min(values) >= 0 and max(values) < limit)):
        return
    index, value = next(
        (index, value) for index, value in enumerate(values) if type(value) is not int or not 0 <= value < limit
    )
    raise SnapshotFormatError(f"{what} number {index} is {short_repr(value)}. Was the file damaged?")


def _blocks(segments: Sequence[Mapping[str, Any]], starts: Sequence[int], where: str) -> list[HeldBlock]:
    """The blocks of all segments, free ones too; within a segment they are contiguous."""
    of_segments = [segment.get("blocks", []) for segment in segments]
    are_lists = all(isinstance(blocks, list) for blocks in of_segments)
    every = list(itertools.chain.from_iterable(of_segments)) if are_lists else []
    if not are_lists or not {dict}.issuperset(map(type, every)):
        raise SnapshotFormatError(f"{where}: a segment's `blocks` is not a list of blocks. Was the file damaged?")
    # only newer files contain a block's address and requested size
    sizes: list[Any] = [block.get("size") for block in every]
    requested: list[Any] = [block.get("requested_size", size) for block, size in zip(every, sizes, strict=True)]
    _require_numbers(sizes, SIZE_LIMIT, f"{where}: a block's size")
    _require_numbers(requested, SIZE_LIMIT, f"{where}: a block's requested_size")
    addresses = []
    for start, blocks in zip(starts, of_segments, strict=True):
        address = start
        for block in blocks:
            addresses.append(address)
            address += block["size"]
    states = [block.get("state") for block in every]
    held = [isinstance(state, str) and state.startswith(_HELD) for state in states]
    allocated = [state == _ALLOCATED for state in states]
    frames = [block.get("frames", ()) for block in every]
    columns = (addresses, requested, sizes, held, allocated, frames)
    return list(map(HeldBlock._make, zip(*columns, strict=True)))
