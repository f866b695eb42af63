"""Undo a device's events from its final blocks backwards, to the state before the recording's first event."""

from typing import Any

import numpy as np

from ligerprof.snapshots.events import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    OUT_OF_MEMORY,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    EventColumns,
)
from ligerprof.snapshots.ordered import OrderedFreeSpace
from ligerprof.snapshots.repetition import MOST_TURNS_COMPARED, Repetition
from ligerprof.snapshots.state import DeviceState, HeldBlock
from ligerprof.snapshots.trace import DeviceTrace
from ligerprof.torch_memory.allocator.sizes import SizeRules

_EVENTS_AT_ONCE = 2**16


def rewind(
    trace: DeviceTrace,
    columns: EventColumns,
    final: DeviceState,
    rules: SizeRules,
    repetition: Repetition | None = None,
) -> DeviceState:
    """The state before the first event.

    Exact with one exception: a block of the large pool that was allocated before the trace and
    freed within it may have included an unsplit remainder of up to 1 MiB, which no event shows.

    Args:
        final: taken over.
        repetition: once a turn of it, undone, leaves the state that it began in, the turns before are not undone.
    """
    undo = _Undo(columns, final, rules)
    first, last = (0, 0) if repetition is None else (repetition.start, repetition.end)
    undo.events(range(last, len(columns.actions)))
    if repetition is not None:
        undo.turns(repetition)
    undo.events(range(first))
    if frees_carry_the_owners_stack(trace, columns):
        for address, index in undo.freed_by.items():
            undo.held[address] = undo.held[address]._replace(frames=trace[index].get("frames", ()))
    return DeviceState(space=undo.space.unordered(), blocks=undo.held, reserved_bytes=undo.reserved_bytes)


class _Undo:
    """The state while undoing events; those that do not fit are skipped, and the forward replay counts them."""

    def __init__(self, columns: EventColumns, final: DeviceState, rules: SizeRules) -> None:
        self.columns = columns
        self.rules = rules
        self.held = final.blocks
        # by address: the event that freed a block that is held again
        self.freed_by: dict[int, int] = {}
        self.space = OrderedFreeSpace(final.space)
        self.reserved_bytes = final.reserved_bytes
        self.steps = {
            ALLOC: self.alloc,
            FREE_REQUESTED: self.free_requested,
            FREE_COMPLETED: self.free_completed,
            SEGMENT_ALLOC: self.segment_alloc,
            SEGMENT_FREE: self.segment_free,
            SEGMENT_MAP: self.segment_map,
            SEGMENT_UNMAP: self.segment_unmap,
        }

    def events(self, events: range) -> None:
        """Undo some events, the last one first."""
        for start in reversed(range(events.start, events.stop, _EVENTS_AT_ONCE)):
            piece = slice(start, min(start + _EVENTS_AT_ONCE, events.stop))
            actions = self.columns.actions[piece]
            moves = np.flatnonzero(actions < OUT_OF_MEMORY)[::-1]
            columns = (actions, self.columns.addresses[piece], self.columns.sizes[piece])
            values = (column[moves].tolist() for column in columns)
            for action, address, size, index in zip(*values, (moves + start).tolist(), strict=True):
                self.steps[action](address, size, index)

    def turns(self, repetition: Repetition) -> None:
        """Undo a repetition."""
        before = self._state()
        for turn, events in enumerate(reversed(list(repetition.turns))):
            reserved_bytes = self.reserved_bytes
            self.events(events)
            if turn < MOST_TURNS_COMPARED:
                after = self._state()
                if after == before:
                    left = repetition.count - turn - 1
                    self.reserved_bytes += (self.reserved_bytes - reserved_bytes) * left
                    for address, index in self.freed_by.items():
                        if index in events:
                            self.freed_by[address] = index - repetition.period * left
                    break
                before = after

    def _state(self) -> object:
        """All that the outcome of further events depends on, and what is known of the blocks."""
        space = self.space
        blocks = {
            address: (block.block_bytes, block.requested_bytes, block.allocated) for address, block in self.held.items()
        }
        return dict(space.starts), dict(space.ends), set(space.borders), blocks

    def alloc(self, address: int, _size: int, _index: int) -> None:
        block = self.held.pop(address, None)
        self.freed_by.pop(address, None)
        if block is not None:
            self.space.give(address, block.block_bytes)

    def free_requested(self, address: int, size: int, index: int) -> None:
        if address not in self.held:
            self.free_completed(address, size, index)
        if address in self.held:
            self.held[address] = self.held[address]._replace(allocated=True)

    def free_completed(self, address: int, size: int, index: int) -> None:
        free = self.space.around(address)
        if free is None:
            return
        room = free[0] + free[1] - address
        block_bytes = self.rules.round_request(size)
        if not self.rules.splits_off(block_bytes, room - block_bytes):
            block_bytes = room
        if self.space.cut(address, block_bytes):
            self.held[address] = HeldBlock(address, size, block_bytes, allocated=False)
            self.freed_by[address] = index

    def segment_alloc(self, address: int, size: int, index: int) -> None:
        self.space.borders.discard(address)
        self.segment_map(address, size, index)

    def segment_map(self, address: int, size: int, _index: int) -> None:
        if self.space.cut(address, size):
            self.reserved_bytes -= size

    def segment_free(self, address: int, size: int, index: int) -> None:
        self.space.borders.add(address)
        self.segment_unmap(address, size, index)

    def segment_unmap(self, address: int, size: int, _index: int) -> None:
        self.space.give(address, size)
        self.reserved_bytes += size


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
