"""Undo a device's events from its final blocks backwards: what it held before the recording's first event."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ligerprof.snapshots.events import DeviceState, Event, EventColumns, HeldBlock
from ligerprof.snapshots.rules import SizeRules


def rewind(trace: Sequence[Event], columns: EventColumns, final: DeviceState, rules: SizeRules) -> DeviceState:
    """The state before the first event.

    Exact but for one thing: a block of the large pool that was made before the trace and freed
    within it may have kept up to 1 MiB of unsplit rest that no event shows.
    """
    undo = _Undo(trace, final, rules, keeps_stacks=_frees_carry_the_owners_stack(trace, columns))
    for index in range(len(columns.actions) - 1, -1, -1):
        step = undo.steps.get(columns.actions[index])
        if step is not None:
            step(columns.addresses[index], columns.sizes[index], index)
    return DeviceState(space=undo.space, blocks=undo.held, reserved_bytes=undo.reserved_bytes)


class _Undo:
    """The state while going back; what does not fit is passed over, and the forward replay counts it."""

    def __init__(self, trace: Sequence[Event], final: DeviceState, rules: SizeRules, *, keeps_stacks: bool) -> None:
        self.trace = trace
        self.rules = rules
        self.keeps_stacks = keeps_stacks
        self.held = dict(final.blocks)
        self.space = final.space.copy()
        self.reserved_bytes = final.reserved_bytes
        self.steps = {
            "alloc": self.alloc,
            "free_requested": self.free_requested,
            "free_completed": self.free_completed,
            "segment_alloc": self.segment_alloc,
            "segment_free": self.segment_free,
            "segment_map": self.segment_map,
            "segment_unmap": self.segment_unmap,
        }

    def alloc(self, address: int, _size: int, _index: int) -> None:
        block = self.held.pop(address, None)
        if block is not None:
            self.space.give(address, block.block_bytes)

    def free_requested(self, address: int, size: int, index: int) -> None:
        block = self.held.get(address)
        if block is None:
            self.free_completed(address, size, index)
            block = self.held.get(address)
        if block is not None:
            self.held[address] = replace(block, allocated=True)

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
            self.held[address] = HeldBlock(
                address=address, requested_bytes=size, block_bytes=block_bytes, allocated=False, frames=frames
            )

    def segment_alloc(self, address: int, size: int, _index: int) -> None:
        self.space.borders.discard(address)
        self.segment_map(address, size, _index)

    def segment_map(self, address: int, size: int, _index: int) -> None:
        if self.space.cut(address, size):
            self.reserved_bytes -= size

    def segment_free(self, address: int, size: int, _index: int) -> None:
        self.space.borders.add(address)
        self.segment_unmap(address, size, _index)

    def segment_unmap(self, address: int, size: int, _index: int) -> None:
        self.space.give(address, size)
        self.reserved_bytes += size


def _frees_carry_the_owners_stack(trace: Sequence[Event], columns: EventColumns) -> bool:
    """Whether events of freeing repeat the stack of the allocation (context="alloc") and not their own."""
    stacks: dict[int, Any] = {}
    for index, action in enumerate(columns.actions):
        if action == "alloc":
            stacks[columns.addresses[index]] = trace[index].get("frames")
        elif action == "free_requested" and (stack := stacks.get(columns.addresses[index])):
            return bool(stack == trace[index].get("frames"))
    return False
