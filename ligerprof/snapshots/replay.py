"""Replay a device's allocator events into blocks, so that allocated and reserved bytes are right at every moment."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
    DeviceState,
    EventColumns,
    HeldBlock,
)
from ligerprof.snapshots.reader import Snapshot
from ligerprof.snapshots.rewind import rewind
from ligerprof.snapshots.stamp import Stamp
from ligerprof.snapshots.trace import Int64s, Trace
from ligerprof.torch_memory.allocator.sizes import SizeRules

_NOT_IN_TRACE = -1
_NO_BLOCK = -1
# both steps of giving a block back, one right after the other
_FREE = -1
_GROWS, _SHRINKS = (SEGMENT_ALLOC, SEGMENT_MAP), (SEGMENT_FREE, SEGMENT_UNMAP)


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """Blocks and totals of one device. Moment m is after m events; moment 0 is before the first.

    Attributes:
        device: index of the device.
        trace: its events.
        requested_bytes: what each block's owner asked for; blocks are in the order they were made.
        block_bytes: what the allocator gave it, as memory_allocated counts.
        allocated_by: index of the event that made each block, -1 where it is older than the trace.
        freed_by: index of the event that asked to free it, -1 where it lives to the end.
        allocated_bytes: at each moment; one more than there are events.
        reserved_bytes: at each moment.
        older_blocks: the blocks that are older than the trace; they come first.
        complete: whether the trace begins with an empty device.
        verified: whether the replay ends in exactly the segments and blocks that the file says.
        mismatches: events that do not fit the ones before them.
        out_of_memory: index of the first event that says so, None where there is none.
    """

    device: int
    trace: Trace
    requested_bytes: Int64s
    block_bytes: Int64s
    allocated_by: Int64s
    freed_by: Int64s
    allocated_bytes: Int64s
    reserved_bytes: Int64s
    older_blocks: Sequence[HeldBlock]
    complete: bool
    verified: bool
    mismatches: int
    out_of_memory: int | None = None

    @property
    def last_moment(self) -> int:
        """The moment after the last event."""
        return len(self.trace)

    def peak_moment(self, start: int = 0, stop: int | None = None) -> int:
        """The first moment of the highest allocated bytes from `start` up to and with `stop`."""
        stop = self.last_moment if stop is None else stop
        return start + int(np.argmax(self.allocated_bytes[start : stop + 1]))

    def live_at(self, moment: int) -> Int64s:
        """Indices of the blocks that are allocated at a moment, oldest first."""
        freed_later = (self.freed_by == _NOT_IN_TRACE) | (self.freed_by >= moment)
        return np.flatnonzero((self.allocated_by < moment) & freed_later).astype(np.int64)

    def frames_of(self, block: int) -> Any:
        """The stack that asked for a block, as the file has it and not checked; None where it has none."""
        event = int(self.allocated_by[block])
        return self.older_blocks[block].frames if event == _NOT_IN_TRACE else self.trace[event].get("frames")

    def stamp_of(self, event: int) -> Stamp | None:
        """Our own stamp on an event, None where it has none."""
        text = self.trace[event].get("user_metadata") if event >= 0 else None
        return Stamp.parse(text) if isinstance(text, str) else None


def replay(snapshot: Snapshot, device: int) -> Replay:
    """Replay one device; a trace that lost its beginning starts from what must have been there.

    Raises:
        SnapshotFormatError: events without action, or whose addresses or sizes are no numbers.
    """
    trace, where = snapshot.trace_of(device), f"{snapshot.source}: device {device}"
    columns = EventColumns.of(trace, where)
    final = DeviceState.from_segments(snapshot.segments_of(device), where)
    rules = SizeRules.from_settings(snapshot.settings)
    run = _Run(DeviceState(), rules)
    run.play(columns, stop_at_mismatch=True)
    verified = run.ends_in(final)
    complete = verified or (run.mismatches == 0 and not snapshot.segments)
    if not complete:
        run = _Run(rewind(trace, columns, final, rules), rules)
        run.play(columns)
        verified = run.ends_in(final)
    replayed = run.result(device, trace, complete=complete, verified=verified)
    refused = np.flatnonzero(columns.actions == OUT_OF_MEMORY)
    return replace(replayed, out_of_memory=int(refused[0]) if len(refused) else None)


def state_at(snapshot: Snapshot, replayed: Replay, moment: int) -> DeviceState:
    """What a replayed device held at a moment: replays it up to there once more."""
    where, rules = snapshot.source, SizeRules.from_settings(snapshot.settings)
    before, columns = DeviceState(), EventColumns.of(replayed.trace, where)
    if not replayed.complete:
        final = DeviceState.from_segments(snapshot.segments_of(replayed.device), where)
        before = rewind(replayed.trace, columns, final, rules)
    run = _Run(before, rules)
    run.play(columns.up_to(moment))
    return run.state()


class _Run:
    """The allocator's state while its events are replayed."""

    def __init__(self, before: DeviceState, rules: SizeRules) -> None:
        self.rules = rules
        self.space = before.space.copy()
        self.starts, self.ends = self.space.starts, self.space.ends
        self.start_reserved_bytes = before.reserved_bytes
        self.older = [before.blocks[address] for address in sorted(before.blocks)]
        # address to block index: in use, and given back but not yet free
        self.used = {block.address: index for index, block in enumerate(self.older) if block.allocated}
        self.waiting = {block.address: index for index, block in enumerate(self.older) if not block.allocated}
        self.held = [block.block_bytes for block in self.older]
        # of the events of freeing, in their order
        self.freed: list[int] = []
        self.mismatches = 0

    def play(self, columns: EventColumns, *, stop_at_mismatch: bool = False) -> None:  # noqa: C901 - see below
        """Replay every event, or up to the first that does not fit the ones before it."""
        self.columns = columns
        used, held, starts, ends, borders = self.used, self.held, self.starts, self.ends, self.space.borders
        rounded = {size: self._round(size) for size in np.unique(columns.sizes[columns.actions == ALLOC]).tolist()}
        # what most events do, FreeSpace's give included, stands in the loop itself: a trace has a million of them
        for action, address, size in _steps(columns):
            if action == _FREE and address in used:
                block = used.pop(address)
                self.freed.append(block)
                start, end = address, address + held[block]
                if end in starts and end not in borders:
                    end += starts.pop(end)
                if start in ends and start not in borders:
                    start = ends.pop(start)
                starts[start], ends[end] = end - start, start
                continue
            if action == ALLOC:
                block_bytes, splits_from = rounded[size]
                free = starts.pop(address, _NOT_IN_TRACE)
                rest = free - block_bytes
                used[address] = len(held)
                if rest >= splits_from:
                    held.append(block_bytes)
                    ends[address + free] = address + block_bytes
                    starts[address + block_bytes] = rest
                    continue
                held.append(max(free, block_bytes))
                if rest >= 0:
                    del ends[address + free]
                    continue
                if free >= 0:
                    starts[address] = free
            elif self._step(action, address, size):
                continue
            self.mismatches += 1
            if stop_at_mismatch:
                return

    def _step(self, action: int, address: int, size: int) -> bool:
        """What few events do; False where it does not fit the ones before it."""
        if action == _FREE:
            self.mismatches += not self._step(FREE_REQUESTED, address, size)
            return self._step(FREE_COMPLETED, address, size)
        if action == FREE_REQUESTED:
            block = self.used.pop(address, _NO_BLOCK)
            self.freed.append(block)
            if block >= 0:
                self.waiting[address] = block
            return block >= 0
        if action == FREE_COMPLETED:
            block = self.waiting.pop(address, _NO_BLOCK)
            if block >= 0:
                self.space.give(address, self.held[block])
            return block >= 0
        return self._change_segments(action, address, size)

    def _change_segments(self, action: int, address: int, size: int) -> bool:
        if action == SEGMENT_ALLOC:
            self.space.borders.add(address)
        elif action == SEGMENT_FREE:
            self.space.borders.discard(address)
        if action in _GROWS:
            self.space.give(address, size)
            return True
        return self.space.cut(address, size)

    def _round(self, size: int) -> tuple[int, int]:
        """Bytes of the block that serves a request, and the smallest rest that is split off it."""
        block_bytes = self.rules.round_request(size)
        return block_bytes, self.rules.smallest_rest(block_bytes)

    def ends_in(self, final: DeviceState) -> bool:
        """Whether all events fitted and the device now holds what it should."""
        return (
            self.mismatches == 0
            and int(self.reserved()[-1]) == final.reserved_bytes
            and self.starts == final.space.starts
            and self.block_sizes() == final.block_sizes()
        )

    def block_sizes(self) -> dict[int, int]:
        """Bytes of the blocks that are not free now, by address."""
        return {address: self.held[block] for address, block in (*self.waiting.items(), *self.used.items())}

    def state(self) -> DeviceState:
        """What the device holds now; stacks and requests left out."""
        blocks = {address: HeldBlock(address, 0, size) for address, size in self.block_sizes().items()}
        return DeviceState(space=self.space, blocks=blocks, reserved_bytes=int(self.reserved()[-1]))

    def reserved(self) -> Int64s:
        """Reserved bytes at each moment."""
        actions, sizes = self.columns.actions, self.columns.sizes
        grows, shrinks = np.isin(actions, _GROWS), np.isin(actions, _SHRINKS)
        changes = np.where(grows, sizes, 0) - np.where(shrinks, sizes, 0)
        return self.start_reserved_bytes + np.append(0, np.cumsum(changes))

    def result(self, device: int, trace: Trace, *, complete: bool, verified: bool) -> Replay:
        actions, sizes = self.columns.actions, self.columns.sizes
        made = np.flatnonzero(actions == ALLOC)
        older = np.array([block.requested_bytes for block in self.older], dtype=np.int64)
        requested, block_bytes = np.append(older, sizes[made]), np.array(self.held, dtype=np.int64)
        allocated_by = np.append(np.full(len(older), _NOT_IN_TRACE), made)
        freed_by = np.full(len(block_bytes), _NOT_IN_TRACE)
        freed = np.array(self.freed, dtype=np.int64)
        freed_by[freed[freed >= 0]] = np.flatnonzero(actions == FREE_REQUESTED)[freed >= 0]
        # what waited for another stream at the start was allocated before the trace, not in it
        keep = np.ones(len(block_bytes), dtype=bool)
        keep[[index for index, block in enumerate(self.older) if not block.allocated]] = False
        changes = np.zeros(len(trace) + 1, dtype=np.int64)
        changes[0] = block_bytes[: len(older)][keep[: len(older)]].sum()
        # an event makes or frees one block
        changes[made + 1] = block_bytes[len(older) :]
        known = keep & (freed_by >= 0)
        changes[freed_by[known] + 1] = -block_bytes[known]
        return Replay(
            device=device,
            trace=trace,
            requested_bytes=requested[keep],
            block_bytes=block_bytes[keep],
            allocated_by=allocated_by[keep],
            freed_by=freed_by[keep],
            allocated_bytes=np.cumsum(changes),
            reserved_bytes=self.reserved(),
            older_blocks=[block for block in self.older if block.allocated],
            complete=complete,
            verified=verified,
            mismatches=self.mismatches,
        )


def _steps(columns: EventColumns) -> Iterator[tuple[int, int, int]]:
    """Action, address and size of all that moves memory; both steps of giving back as one where they follow."""
    actions, addresses = columns.actions.copy(), columns.addresses
    at_once = (actions[:-1] == FREE_REQUESTED) & (actions[1:] == FREE_COMPLETED) & (addresses[:-1] == addresses[1:])
    requests = np.flatnonzero(at_once)
    moves = actions < OUT_OF_MEMORY
    actions[requests], moves[requests + 1] = _FREE, False
    return zip(actions[moves].tolist(), addresses[moves].tolist(), columns.sizes[moves].tolist(), strict=True)
