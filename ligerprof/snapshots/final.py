"""A device's segments and their blocks at the end of a recording, as checked columns."""

import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter, methodcaller
from typing import Any

import numpy as np
import numpy.typing as npt

from ligerprof.errors import SnapshotFormatError
from ligerprof.snapshots.distinct import is_among
from ligerprof.snapshots.events import ADDRESS_LIMIT, SIZE_LIMIT, TOTAL_LIMIT
from ligerprof.snapshots.state import FreeSpace, HeldBlock
from ligerprof.snapshots.trace import Int64s
from ligerprof.text import short_repr

Flags = npt.NDArray[np.bool_]

_ALLOCATED = "active_allocated"
# active_pending_free, active_awaiting_free: waiting for another stream
_HELD = "active"
_ROWS_AT_ONCE = 2**14


@dataclass(frozen=True, kw_only=True, eq=False)
class FinalSegments:
    """The `segments` of a device, and the blocks in them, which are contiguous within a segment.

    Attributes:
        starts: address of each segment.
        sizes: its `total_size`.
        is_expandable: whether its ranges merge once the memory between them is mapped.
        block_counts: number of its blocks, free ones included.
        addresses: of all blocks, segment by segment.
        requested: the program's request for each block.
        block_sizes: bytes of each block.
        held: False for free blocks.
        allocated: False for free blocks, and for those that wait for another stream.
        frames: the stack of each block's allocation, as in the file.
    """

    starts: Int64s
    sizes: Int64s
    is_expandable: Flags
    block_counts: Int64s
    addresses: Int64s
    requested: Int64s
    block_sizes: Int64s
    held: Flags
    allocated: Flags
    frames: Sequence[Any]

    @classmethod
    def of(cls, segments: Sequence[Mapping[str, Any]], where: str) -> "FinalSegments":
        """Read the `segments` of a snapshot, which are not kept.

        Raises:
            SnapshotFormatError: a value is not a block, or an address or size is not a number in range.
        """
        starts = _numbers(
            [segment.get("address") for segment in segments], ADDRESS_LIMIT, f"{where}: a segment's address"
        )
        sizes = _numbers(
            [segment.get("total_size") for segment in segments], SIZE_LIMIT, f"{where}: a segment's total_size"
        )
        of_segments = [segment.get("blocks", []) for segment in segments]
        are_lists = all(isinstance(blocks, list) for blocks in of_segments)
        blocks: list[dict[str, Any]] = list(itertools.chain.from_iterable(of_segments)) if are_lists else []
        if not are_lists or not {dict}.issuperset(map(type, blocks)):
            raise SnapshotFormatError(f"{where}: a segment's `blocks` is not a list of blocks. Was the file damaged?")
        of_blocks, requested, states, frames = _values(blocks)
        block_sizes = _numbers(of_blocks, SIZE_LIMIT, f"{where}: a block's size")
        if max(sizes.sum(dtype=np.float64), block_sizes.sum(dtype=np.float64)) >= TOTAL_LIMIT:
            raise SnapshotFormatError(f"{where}: its segments have more bytes than 62 bits can count. Was it damaged?")
        counts = np.fromiter(map(len, of_segments), dtype=np.int64, count=len(of_segments))
        # most blocks share a few strings
        state_of = dict(zip(map(id, states), states, strict=True))
        is_held = {key: isinstance(state, str) and state.startswith(_HELD) for key, state in state_of.items()}
        is_allocated = {key: state == _ALLOCATED for key, state in state_of.items()}
        return cls(
            starts=starts,
            sizes=sizes,
            is_expandable=np.array([segment.get("is_expandable") is True for segment in segments], dtype=bool),
            block_counts=counts,
            addresses=_addresses(starts, counts, block_sizes),
            requested=_numbers(requested, SIZE_LIMIT, f"{where}: a block's requested_size"),
            block_sizes=block_sizes,
            held=np.fromiter(map(is_held.__getitem__, map(id, states)), bool, len(states)),
            allocated=np.fromiter(map(is_allocated.__getitem__, map(id, states)), bool, len(states)),
            frames=frames,
        )

    @property
    def reserved_bytes(self) -> int:
        """The bytes of all segments."""
        return int(self.sizes.sum())

    @cached_property
    def filled(self) -> Int64s:
        """The bytes of each segment's blocks."""
        totals = np.append(0, np.cumsum(self.block_sizes))
        ends = np.cumsum(self.block_counts)
        filled: Int64s = totals[ends] - totals[ends - self.block_counts]
        return filled

    @cached_property
    def held_by_address(self) -> Int64s:
        """Indices of the blocks that are not free, by address."""
        held = np.flatnonzero(self.held)
        return held[np.argsort(self.addresses[held], kind="stable")]

    def held_block(self, index: int) -> HeldBlock:
        """One of the blocks that are not free."""
        return HeldBlock(
            address=int(self.addresses[index]),
            requested_bytes=int(self.requested[index]),
            block_bytes=int(self.block_sizes[index]),
            allocated=bool(self.allocated[index]),
            frames=self.frames[index],
        )

    def holds(self, blocks: Mapping[int, int], free: Mapping[int, int]) -> bool:
        """Whether these are the addresses and sizes of the blocks that are not free, and of the free space."""
        held = self.held_by_address
        addresses, sizes = self.addresses[held], self.block_sizes[held]
        # of several blocks at one address, all but the last are empty
        last = np.append(addresses[1:] != addresses[:-1], True)[: len(held)]
        return _are_equal(blocks, addresses[last], sizes[last]) and _are_equal(free, *self._free_runs())

    def _free_runs(self) -> tuple[Int64s, Int64s]:
        """Start and size of the free space between blocks."""
        free = np.flatnonzero(~self.held & (self.block_sizes > 0))
        free = free[np.argsort(self.addresses[free], kind="stable")]
        starts, ends = self.addresses[free], self.addresses[free] + self.block_sizes[free]
        if (starts[1:] < ends[:-1]).any():
            # overlapping segments, as only damaged files have them
            space = self.free_space().starts
            return np.array(list(space), dtype=np.int64), np.array(list(space.values()), dtype=np.int64)
        borders = self.starts[~self.is_expandable]
        is_first = np.append(True, (starts[1:] != ends[:-1]) | is_among(starts[1:], borders))[: len(free)]
        firsts = np.flatnonzero(is_first)
        return starts[firsts], ends[np.append(firsts[1:], len(free))[: len(firsts)] - 1] - starts[firsts]

    def free_space(self) -> FreeSpace:
        """A new copy of the free blocks."""
        space = FreeSpace()
        space.borders.update(self.starts[~self.is_expandable].tolist())
        free = ~self.held & (self.block_sizes > 0)
        for start, size in zip(self.addresses[free].tolist(), self.block_sizes[free].tolist(), strict=True):
            space.give(start, size)
        return space


def _are_equal(known: Mapping[int, int], keys: Int64s, values: Int64s) -> bool:
    """Whether a mapping has exactly some distinct keys, with these values."""
    return len(known) == len(keys) and all(
        known.get(key) == value
        for start in range(0, len(keys), _ROWS_AT_ONCE)
        for key, value in zip(
            keys[start : start + _ROWS_AT_ONCE].tolist(), values[start : start + _ROWS_AT_ONCE].tolist(), strict=True
        )
    )


def _values(blocks: Sequence[Mapping[str, Any]]) -> tuple[Sequence[Any], ...]:
    """Size, requested size, state and frames of each block."""
    try:
        # at once, since each look at a block may have to wait for memory
        rows = list(map(itemgetter("size", "requested_size", "state", "frames"), blocks))
    except KeyError:
        # only newer files contain a block's requested size
        rows = [
            (size, block.get("requested_size", size), block.get("state"), block.get("frames", ()))
            for block, size in zip(blocks, map(methodcaller("get", "size"), blocks), strict=True)
        ]
    return tuple(zip(*rows, strict=True)) or ((), (), (), ())


def _numbers(values: Sequence[Any], limit: int, what: str) -> Int64s:
    """The values as a column; raise a SnapshotFormatError that names the first one that is not in [0, limit)."""
    if {int}.issuperset(map(type, values)):
        with suppress(OverflowError):
            column = np.array(values, dtype=np.int64)
            if column.min(initial=0) >= 0 and column.max(initial=0) < limit:
                return column
    index, value = next(
        (index, value) for index, value in enumerate(values) if type(value) is not int or not 0 <= value < limit
    )
    raise SnapshotFormatError(f"{what} number {index} is {short_repr(value)}. Was the file damaged?")


def _addresses(starts: Int64s, counts: Int64s, block_sizes: Int64s) -> Int64s:
    before = np.cumsum(block_sizes) - block_sizes
    firsts = np.cumsum(counts) - counts
    has_blocks = counts > 0
    shifts = np.zeros(len(starts), dtype=np.int64)
    shifts[has_blocks] = starts[has_blocks] - before[firsts[has_blocks]]
    return before + np.repeat(shifts, counts)
