"""A snapshot's events and final blocks as checked columns: what replaying and rewinding both read."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ligerprof.errors import SnapshotFormatError
from ligerprof.snapshots.space import FreeSpace
from ligerprof.snapshots.trace import Int64s, Trace

# virtual addresses have 57 bits at most; no device has 16 TiB
_ADDRESS_LIMIT = 2**62
_SIZE_LIMIT = 2**44
_ALLOCATED = "active_allocated"
_HELD_STATES = (_ALLOCATED, "active_pending_free", "active_awaiting_free")

# the events that move memory or tell that there is none; of others only the place in the order counts
ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "oom",
)
ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, OUT_OF_MEMORY = range(8)
_OTHER = len(ACTIONS)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EventColumns:
    """The part of every event that moves memory.

    Attributes:
        actions: indices into ACTIONS, one more for all others.
        addresses: 0 where an event has none.
        sizes: requested bytes, or a segment's bytes.
    """

    actions: Int64s
    addresses: Int64s
    sizes: Int64s

    @classmethod
    def of(cls, trace: Trace, where: str) -> "EventColumns":
        """Check and copy out the columns.

        Raises:
            SnapshotFormatError: an event without action, or a number that is none or out of range.
        """
        codes, names = trace.objects("action")
        known = np.array([_action(name) for name in names], dtype=np.int64)
        actions = known[codes]
        nameless = np.flatnonzero(actions < 0)
        if len(nameless):
            raise SnapshotFormatError(f"{where}: event {nameless[0]} has no action. Was the file damaged?")
        return cls(
            actions=actions,
            addresses=_numbers(trace, "addr", _ADDRESS_LIMIT, where),
            sizes=_numbers(trace, "size", _SIZE_LIMIT, where),
        )

    def __len__(self) -> int:
        return len(self.actions)

    def up_to(self, stop: int) -> "EventColumns":
        """The first events."""
        return EventColumns(actions=self.actions[:stop], addresses=self.addresses[:stop], sizes=self.sizes[:stop])


class HeldBlock(NamedTuple):
    """A block at some moment.

    Attributes:
        held: False where it is free.
        requested_bytes: what its owner asked for.
        block_bytes: what the allocator gave.
        allocated: False where it waits for another stream and counts as allocated no more.
        frames: the stack that asked for it, as the file has it.
    """

    address: int
    requested_bytes: int
    block_bytes: int
    held: bool = True
    allocated: bool = True
    frames: Any = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceState:
    """What a device holds at one moment.

    Attributes:
        space: the free blocks in its segments.
        blocks: those that are not free, by address.
        reserved_bytes: bytes of all segments.
    """

    space: FreeSpace = field(default_factory=FreeSpace)
    blocks: Mapping[int, HeldBlock] = field(default_factory=dict)
    reserved_bytes: int = 0

    @classmethod
    def from_segments(cls, segments: Sequence[Mapping[str, Any]], where: str) -> "DeviceState":
        """Read the `segments` of a snapshot.

        Raises:
            SnapshotFormatError: blocks or numbers that are none.
        """
        space = FreeSpace()
        starts: list[Any] = [segment.get("address") for segment in segments]
        sizes: list[Any] = [segment.get("total_size") for segment in segments]
        require_numbers(starts, _ADDRESS_LIMIT, f"{where}: a segment's address")
        require_numbers(sizes, _SIZE_LIMIT, f"{where}: a segment's total_size")
        # ranges of one expandable segment merge when what lies between them is mapped
        fixed = [segment.get("is_expandable") is not True for segment in segments]
        space.borders.update(itertools.compress(starts, fixed))
        held: dict[int, HeldBlock] = {}
        for block in _blocks(segments, starts, where):
            if block.held:
                held[block.address] = block
            elif block.block_bytes:
                space.give(block.address, block.block_bytes)
        return cls(space=space, blocks=held, reserved_bytes=sum(sizes))

    def block_sizes(self) -> dict[int, int]:
        """Bytes of the blocks that are not free, by address."""
        return {address: block.block_bytes for address, block in self.blocks.items()}


def require_numbers(values: Sequence[Any], limit: int, what: str) -> None:
    """Refuse what is no integer from 0 up to `limit`.

    Raises:
        SnapshotFormatError: names the first such value.
    """
    if set(map(type, values)) <= {int} and (not values or (min(values) >= 0 and max(values) < limit)):
        return
    index, value = next(
        (index, value) for index, value in enumerate(values) if type(value) is not int or not 0 <= value < limit
    )
    raise SnapshotFormatError(f"{what} number {index} is {value!r:.40}. Was the file damaged?")


def _action(name: Any) -> int:
    if type(name) is not str:
        return -1
    return ACTIONS.index(name) if name in ACTIONS else _OTHER


def _numbers(trace: Trace, key: str, limit: int, where: str) -> Int64s:
    numbers = trace.numbers(key)
    wrong = np.flatnonzero((numbers < 0) | (numbers >= limit))
    if len(wrong):
        value = trace[int(wrong[0])].get(key)
        raise SnapshotFormatError(f"{where}: {key} number {wrong[0]} is {value!r:.40}. Was the file damaged?")
    return numbers


def _blocks(segments: Sequence[Mapping[str, Any]], starts: Sequence[int], where: str) -> Iterator[HeldBlock]:
    """The blocks of all segments, free ones too; in a segment they follow each other without gaps."""
    of_segments = [segment.get("blocks", []) for segment in segments]
    if not all(isinstance(blocks, list) and {dict}.issuperset(map(type, blocks)) for blocks in of_segments):
        raise SnapshotFormatError(f"{where}: a segment's blocks are no list of blocks. Was the file damaged?")
    # a block's own address and requested size are in newer files only
    sizes: list[Any] = [block.get("size") for blocks in of_segments for block in blocks]
    asked: list[Any] = [block.get("requested_size", block.get("size")) for blocks in of_segments for block in blocks]
    require_numbers(sizes, _SIZE_LIMIT, f"{where}: a block's size")
    require_numbers(asked, _SIZE_LIMIT, f"{where}: a block's requested_size")
    figures = zip(sizes, asked, strict=True)
    for start, blocks in zip(starts, of_segments, strict=True):
        address = start
        for block, (size, requested) in zip(blocks, figures, strict=False):
            state = block.get("state")
            allocated, held = state == _ALLOCATED, state in _HELD_STATES
            yield HeldBlock(address, requested, size, held, allocated, block.get("frames", ()))
            address += size
