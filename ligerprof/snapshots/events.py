"""A snapshot's events and final blocks as checked columns: what replaying and rewinding both read."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ligerprof.errors import SnapshotFormatError
from ligerprof.snapshots.space import FreeSpace

# addresses have 64 bits; no device has 16 TiB
_ADDRESS_LIMIT = 2**64
_SIZE_LIMIT = 2**44
_ALLOCATED = "active_allocated"
_HELD_STATES = (_ALLOCATED, "active_pending_free", "active_awaiting_free")

Event = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class EventColumns:
    """The part of every event that moves memory.

    Attributes:
        actions: `alloc`, `free_requested`, …; events that move none are in here too.
        addresses: 0 where an event has none.
        sizes: requested bytes, or a segment's bytes.
    """

    actions: Sequence[str]
    addresses: Sequence[int]
    sizes: Sequence[int]

    @classmethod
    def of(cls, trace: Sequence[Event], where: str) -> "EventColumns":
        """Check and copy out the columns.

        Raises:
            SnapshotFormatError: an event without action, or a number that is none or out of range.
        """
        actions: list[Any] = [event.get("action") for event in trace]
        if not set(map(type, actions)) <= {str}:
            index = next(index for index, action in enumerate(actions) if type(action) is not str)
            raise SnapshotFormatError(f"{where}: event {index} has no action. Was the file damaged?")
        addresses = [event.get("addr", 0) for event in trace]
        sizes = [event.get("size", 0) for event in trace]
        require_numbers(addresses, _ADDRESS_LIMIT, f"{where}: addr")
        require_numbers(sizes, _SIZE_LIMIT, f"{where}: size")
        return cls(actions=actions, addresses=addresses, sizes=sizes)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldBlock:
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
    def from_segments(cls, segments: Iterable[Mapping[str, Any]], where: str) -> "DeviceState":
        """Read the `segments` of a snapshot.

        Raises:
            SnapshotFormatError: blocks or numbers that are none.
        """
        space = FreeSpace()
        held: dict[int, HeldBlock] = {}
        reserved_bytes = 0
        for segment in segments:
            start: Any = segment.get("address")
            size: Any = segment.get("total_size")
            require_numbers([start], _ADDRESS_LIMIT, f"{where}: a segment's address")
            require_numbers([size], _SIZE_LIMIT, f"{where}: a segment's total_size")
            reserved_bytes += size
            # ranges of one expandable segment merge when what lies between them is mapped
            if segment.get("is_expandable") is not True:
                space.borders.add(start)
            for block in _blocks(segment, start, where):
                if block.held:
                    held[block.address] = block
                elif block.block_bytes:
                    space.give(block.address, block.block_bytes)
        return cls(space=space, blocks=held, reserved_bytes=reserved_bytes)

    def same_as(self, other: "DeviceState") -> bool:
        """Whether both hold the same blocks at the same addresses and are free in the same places."""
        return (
            self.reserved_bytes == other.reserved_bytes
            and self.space.starts == other.space.starts
            and {address: block.block_bytes for address, block in self.blocks.items()}
            == {address: block.block_bytes for address, block in other.blocks.items()}
        )


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


def _blocks(segment: Mapping[str, Any], start: int, where: str) -> Iterable[HeldBlock]:
    """The blocks of a segment, free ones too; they follow each other without gaps."""
    blocks = segment.get("blocks", [])
    if not isinstance(blocks, list) or not set(map(type, blocks)) <= {dict}:
        raise SnapshotFormatError(f"{where}: a segment's blocks are no list of blocks. Was the file damaged?")
    address = start
    for block in blocks:
        size = block.get("size")
        # a block's own address and requested size are in newer files only
        requested = block.get("requested_size", size)
        require_numbers([size, requested], _SIZE_LIMIT, f"{where}: a block's size")
        state = block.get("state")
        yield HeldBlock(
            address=address,
            requested_bytes=requested,
            block_bytes=size,
            held=state in _HELD_STATES,
            allocated=state == _ALLOCATED,
            frames=block.get("frames", ()),
        )
        address += size
