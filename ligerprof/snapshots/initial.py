"""Find the state of a device before a recording's first event, from its final blocks and the events between."""

from typing import Any

import numpy as np

from ligerprof.snapshots.distinct import is_among
from ligerprof.snapshots.events import (
    ADDRESS_LIMIT,
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    EventColumns,
)
from ligerprof.snapshots.final import FinalSegments
from ligerprof.snapshots.state import DeviceState, FreeSpace, HeldBlock
from ligerprof.snapshots.trace import DeviceTrace
from ligerprof.torch_memory.allocator.settings import SizeRules

_EVENTS_AT_ONCE = 2**16
# the remainder of a block is smaller than the smallest block that can be behind it
_MOST_ALLOCATIONS_BEHIND = 64


def state_before(trace: DeviceTrace, columns: EventColumns, final: FinalSegments, rules: SizeRules) -> DeviceState:
    """The state before the first event. What does not fit is left out, and the replay counts it as mismatches.

    Exact with one exception: a block of the large pool that was freed within the trace may have included an unsplit
    remainder of up to 1 MiB. It shows only if another block lay behind it.
    """
    mapped, reserved_bytes = _mapped_before(columns, final)
    starts = sorted(mapped.starts)
    ends = [start + mapped.starts[start] for start in starts]
    space = FreeSpace()
    space.borders = mapped.borders
    older = _OlderBlocks(trace, columns, final)
    upcoming = [*(block.address for block in older.blocks[1:]), ADDRESS_LIMIT]
    blocks = []
    # the range of memory that the blocks are in, and where its free memory starts
    place, free = 0, starts[0] if starts else 0
    for block, following in zip(older.blocks, upcoming, strict=False):
        while place < len(starts) and ends[place] <= block.address:
            _give(space, free, ends[place])
            place += 1
            free = starts[place] if place < len(starts) else 0
        if place == len(starts) or block.address < free:
            continue
        room = min(following, ends[place]) - block.address
        block_bytes = block.block_bytes
        if not block_bytes:
            block_bytes = rules.round_request(block.requested_bytes)
            room = older.room(block, block_bytes, room)
            if not rules.splits_off(block_bytes, room - block_bytes):
                block_bytes = room
        if block_bytes > room:
            continue
        _give(space, free, block.address)
        free = block.address + block_bytes
        blocks.append(block._replace(block_bytes=block_bytes))
    for start, end in zip([free, *starts[place + 1 :]], ends[place:], strict=False):
        _give(space, start, end)
    return DeviceState(space=space, blocks=blocks, reserved_bytes=reserved_bytes)


def _give(space: FreeSpace, start: int, end: int) -> None:
    if start < end:
        space.give(start, end - start)


def _mapped_before(columns: EventColumns, final: FinalSegments) -> tuple[FreeSpace, int]:
    """The ranges of memory before the first event, as one space without blocks, and the bytes of all segments."""
    space, reserved_bytes = FreeSpace(), final.reserved_bytes
    space.borders.update(final.starts[~final.is_expandable].tolist())
    for start, size in zip(final.starts.tolist(), final.sizes.tolist(), strict=True):
        _give(space, start, start + size)
    of_segments = np.flatnonzero((columns.actions >= SEGMENT_ALLOC) & (columns.actions <= SEGMENT_UNMAP))[::-1]
    events = (column[of_segments].tolist() for column in (columns.actions, columns.addresses, columns.sizes))
    for action, address, size in zip(*events, strict=True):
        if action in (SEGMENT_ALLOC, SEGMENT_MAP):
            if action == SEGMENT_ALLOC:
                space.borders.discard(address)
            if space.cut(address, size):
                reserved_bytes -= size
        else:
            if action == SEGMENT_FREE:
                space.borders.add(address)
            space.give(address, size)
            reserved_bytes += size
    return space, reserved_bytes


class _OlderBlocks:
    """The blocks that are not free before the first event: their first event is a release, or they have no event.

    Attributes:
        blocks: by address; block_bytes is 0 if no segment states it.
    """

    def __init__(self, trace: DeviceTrace, columns: EventColumns, final: FinalSegments) -> None:
        moves = np.flatnonzero(columns.actions <= FREE_COMPLETED)
        order = moves[np.argsort(columns.addresses[moves], kind="stable")]
        addresses, actions = columns.addresses[order], columns.actions[order]
        first = np.append(True, addresses[1:] != addresses[:-1])[: len(order)]
        self._starts, self._made = addresses[first & (actions == ALLOC)], order[first & (actions == ALLOC)]
        held = final.held_by_address
        untouched = held[~is_among(final.addresses[held], addresses[first])]
        found = {int(final.addresses[index]): final.held_block(index) for index in untouched.tolist()}
        at_end = dict(zip(final.addresses[held].tolist(), held.tolist(), strict=True))
        # the last event of each one's release
        self._freed: dict[int, int] = {}
        for row in np.flatnonzero(first & (actions != ALLOC)).tolist():
            address, allocated = int(addresses[row]), bool(actions[row] == FREE_REQUESTED)
            is_last = row + 1 == len(order) or bool(first[row + 1])
            if allocated and is_last and address in at_end:
                found[address] = final.held_block(at_end[address])._replace(allocated=True)
                continue
            is_completed = allocated and not is_last and actions[row + 1] == FREE_COMPLETED
            event = self._freed[address] = int(order[row + is_completed])
            found[address] = HeldBlock(address, int(columns.sizes[event]), 0, allocated)
        if self._freed and frees_carry_the_owners_stack(trace, columns):
            for address, event in self._freed.items():
                found[address] = found[address]._replace(frames=trace[event].get("frames", ()))
        self.blocks = [found[address] for address in sorted(found)]

    def room(self, block: HeldBlock, block_bytes: int, room: int) -> int:
        """Bytes from a block up to the first allocation behind it that was made before its release, at most `room`."""
        place = int(np.searchsorted(self._starts, block.address + block_bytes))
        near = slice(place, place + _MOST_ALLOCATIONS_BEHIND)
        earlier = self._starts[near][self._made[near] < self._freed[block.address]]
        return min(room, int(earlier[0]) - block.address) if len(earlier) else room


def frees_carry_the_owners_stack(trace: DeviceTrace, columns: EventColumns) -> bool:
    """Whether free events repeat the stack of the allocation, as with context="alloc"."""
    made: dict[int, int] = {}
    for start in range(0, len(trace), _EVENTS_AT_ONCE):
        piece = slice(start, start + _EVENTS_AT_ONCE)
        pairs = zip(columns.actions[piece].tolist(), columns.addresses[piece].tolist(), strict=True)
        for index, (action, address) in enumerate(pairs, start):
            if action == ALLOC:
                made[address] = index
            elif action == FREE_REQUESTED and address in made and (stack := trace[made[address]].get("frames")):
                return _same_stack(stack, trace[index].get("frames"))
    return False


def _same_stack(first: Any, second: Any) -> bool:
    """Whether two lists of frames name the same places; compares no deeper, since values may contain themselves."""
    if not isinstance(first, list) or not isinstance(second, list) or len(first) != len(second):
        return False
    return all(one is other or _place(one) == _place(other) for one, other in zip(first, second, strict=True))


def _place(frame: Any) -> tuple[Any, ...]:
    values = [frame.get(key) for key in ("filename", "line", "name")] if isinstance(frame, dict) else [frame]
    return tuple(value if isinstance(value, (str, int)) else id(value) for value in values)
