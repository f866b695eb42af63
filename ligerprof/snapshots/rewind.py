"""Undo a device's events from its final blocks backwards, to the state before the recording's first event."""

from typing import Any

import numpy as np

from ligerprof.snapshots.events import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    EventColumns,
)
from ligerprof.snapshots.ordered import OrderedFreeSpace
from ligerprof.snapshots.state import DeviceState, HeldBlock
from ligerprof.snapshots.trace import DeviceTrace
from ligerprof.torch_memory.allocator.sizes import SizeRules


def rewind(trace: DeviceTrace, columns: EventColumns, final: DeviceState, rules: SizeRules) -> DeviceState:
    """The state before the first event.

    Exact with one exception: a block of the large pool that was allocated before the trace and
    freed within it may have included an unsplit remainder of up to 1 MiB, which no event shows.
    """
    undo = _Undo(trace, final, rules, keeps_stacks=_frees_carry_the_owners_stack(trace, columns))
    moves = np.flatnonzero(np.isin(columns.actions, list(undo.steps)))[::-1]
    events = (column[moves].tolist() for column in (columns.actions, columns.addresses, columns.sizes))
    for action, address, size, index in zip(*events, moves.tolist(), strict=True):
        undo.steps[action](address, size, index)
    return DeviceState(space=undo.space, blocks=undo.held, reserved_bytes=undo.reserved_bytes)


class _Undo:
    """The state while undoing events; those that do not fit are skipped, and the forward replay counts them."""

    def __init__(self, trace: DeviceTrace, final: DeviceState, rules: SizeRules, *, keeps_stacks: bool) -> None:
        self.trace = trace
        self.rules = rules
        self.keeps_stacks = keeps_stacks
        self.held = dict(final.blocks)
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

    def alloc(self, address: int, _size: int, _index: int) -> None:
        block = self.held.pop(address, None)
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
            frames: Any = self.trace[index].get("frames", ()) if self.keeps_stacks else ()
            self.held[address] = HeldBlock(address, size, block_bytes, allocated=False, frames=frames)

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


def _frees_carry_the_owners_stack(trace: DeviceTrace, columns: EventColumns) -> bool:
    """Whether free events repeat the stack of the allocation, as with context="alloc"."""
    made: dict[int, int] = {}
    for index, (action, address) in enumerate(zip(columns.actions.tolist(), columns.addresses.tolist(), strict=True)):
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
