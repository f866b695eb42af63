"""Replay a device's allocator events into blocks, so that allocated and reserved bytes are exact at every moment."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ligerprof.snapshots.reader import Snapshot
from ligerprof.snapshots.state import DeviceState, FinalSegments, HeldBlock, state_before
from ligerprof.snapshots.trace import ACTIONS, GROWS, SHRINKS, Action, DeviceTrace, EventColumns, Int64s
from ligerprof.torch_memory.allocator.settings import SizeRules

_MISSING = -1
# a free_requested and the free_completed right after it
_FREE = -1
_EVENTS_AT_ONCE = 2**16
# by action: 1 if its size is added to the reserved bytes, -1 if it is subtracted
_RESERVES = np.zeros(len(ACTIONS) + 1, dtype=np.int64)
_RESERVES[[*GROWS, *SHRINKS]] = 1, 1, -1, -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """Blocks and totals of one device. Moment m is after m events; moment 0 is before the first event.

    Attributes:
        source: the snapshot's file, for messages.
        requested_bytes: the program's request for each block; blocks are in the order of allocation.
        block_bytes: size of each block, which memory_allocated() counts.
        allocated_by: index of the event that allocated each block, -1 if it is older than the trace.
        freed_by: index of the event that requested its release, -1 if it lives to the end.
        allocated_bytes: at each moment, as are reserved_bytes.
        older_blocks: the blocks that are older than the trace; they come first.
        older_waiting: blocks that were freed before the trace, and waited for another stream at its start.
        complete: whether the trace starts with an empty device.
        verified: whether the replay ends in exactly the file's segments and blocks.
        mismatches: number of events that do not fit the events before them.
        segments: the device's segments in the file.
        rules: how the allocator sized blocks.
        failures: indices of the events at which an allocation failed.
    """

    source: str
    device: int
    trace: DeviceTrace
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
    older_waiting: Sequence[HeldBlock] = ()
    segments: Sequence[Mapping[str, Any]] = ()
    rules: SizeRules = field(default_factory=SizeRules)
    failures: tuple[int, ...] = ()

    @property
    def last_moment(self) -> int:
        """The moment after the last event."""
        return len(self.trace)

    def peak_moment(self) -> int:
        """The first moment of the highest allocated bytes."""
        return int(np.argmax(self.allocated_bytes))

    def live_at(self, moment: int) -> Int64s:
        """Indices of the blocks that are allocated at a moment, oldest first."""
        made = np.searchsorted(self.allocated_by, moment)
        # as an unsigned number, -1 is the largest
        return np.flatnonzero(self.freed_by[:made].view(np.uint64) >= np.uint64(moment))

    def addresses_of(self, blocks: Int64s) -> Int64s:
        """Addresses of some blocks."""
        older = np.array([block.address for block in self.older_blocks], dtype=np.int64)
        allocated = self.allocated_by[len(older) :]
        return np.append(older, self.trace.numbers("addr")[allocated])[blocks]

    def until(self, moment: int) -> "Replay":
        """The recording as it would be if it ended at a moment; blocks that are freed later are then never freed."""
        made = self.allocated_by < moment
        return replace(
            self,
            trace=self.trace[:moment],
            requested_bytes=self.requested_bytes[made],
            block_bytes=self.block_bytes[made],
            allocated_by=self.allocated_by[made],
            freed_by=np.where(self.freed_by >= moment, _MISSING, self.freed_by)[made],
            allocated_bytes=self.allocated_bytes[: moment + 1],
            reserved_bytes=self.reserved_bytes[: moment + 1],
            failures=tuple(failure for failure in self.failures if failure < moment),
        )


def replay(snapshot: Snapshot, device: int, *, consume: bool = False) -> Replay:
    """Replay one device; a truncated trace starts from the state that its end implies.

    Args:
        consume: remove the blocks of the device's segments once they are read; they take more memory than all else.

    Raises:
        SnapshotFormatError: from `EventColumns.of` and `FinalSegments.of`.
    """
    trace, where = snapshot.trace_of(device), f"{snapshot.source}: device {device}"
    columns = EventColumns.of(trace, where)
    final = FinalSegments.of(snapshot.segments_of(device), where)
    if consume:
        snapshot.drop_blocks(device)
    rules = SizeRules.from_settings(snapshot.settings)
    run = _Run(columns, DeviceState(), rules)
    run.play(stop_at_mismatch=True)
    verified = run.ends_in(final)
    complete = verified or (run.mismatches == 0 and not snapshot.segments)
    if not complete:
        run = _Run(columns, state_before(trace, columns, final, rules), rules)
        run.play()
        verified = run.ends_in(final)
    return _result(snapshot, device, run, complete=complete, verified=verified)


class _Run:
    """The allocator's state while a device's events are replayed; it takes over the free space of `before`."""

    def __init__(self, columns: EventColumns, before: DeviceState, rules: SizeRules) -> None:
        self.columns = columns
        self.rules = rules
        self.space = before.space
        self.starts, self.ends = self.space.starts, self.space.ends
        self.before = before
        older = before.blocks
        # block index by address: in use, and freed but waiting for another stream
        self.used = {block.address: index for index, block in enumerate(older) if block.allocated}
        self.waiting = {block.address: index for index, block in enumerate(older) if not block.allocated}
        self.held = [block.block_bytes for block in older]
        # the block of each free_requested event
        self.freed: list[int] = []
        self.mismatches = 0

    def play(self, *, stop_at_mismatch: bool = False) -> None:
        """Replay every event, or up to the first that does not fit those before it."""
        used, held, starts, ends, give = self.used, self.held, self.starts, self.ends, self.space.give
        rounded, waiting, alloc = self._round_requests(), self.waiting, int(Action.ALLOC)
        # the most frequent events are inlined: a trace has a million of them
        for action, address, size in _steps(self.columns):
            if action == _FREE and address in used and address not in waiting:
                block = used.pop(address)
                self.freed.append(block)
                give(address, held[block])
                continue
            if action == alloc:
                block_bytes, splits_from = rounded[size]
                free = starts.pop(address, _MISSING)
                remainder = free - block_bytes
                used[address] = len(held)
                if remainder >= splits_from:
                    held.append(block_bytes)
                    ends[address + free] = address + block_bytes
                    starts[address + block_bytes] = remainder
                    continue
                held.append(max(free, block_bytes))
                if remainder >= 0:
                    ends.pop(address + free, None)
                    continue
                if free >= 0:
                    # a new number, which is not marked: see FreeSpace.around
                    starts[address] = free + 0
            elif self._step(action, address, size):
                continue
            self.mismatches += 1
            if stop_at_mismatch:
                return

    def _step(self, action: int, address: int, size: int) -> bool:
        """Replay a less frequent event; False if it does not fit the events before it."""
        if action == _FREE:
            self.mismatches += not self._step(Action.FREE_REQUESTED, address, size)
            return self._step(Action.FREE_COMPLETED, address, size)
        if action == Action.FREE_REQUESTED:
            block = self.used.pop(address, _MISSING)
            self.freed.append(block)
            if block >= 0:
                self.waiting[address] = block
            return block >= 0
        if action == Action.FREE_COMPLETED:
            block = self.waiting.pop(address, _MISSING)
            if block >= 0:
                self.space.give(address, self.held[block])
            return block >= 0
        if action == Action.SEGMENT_ALLOC:
            self.space.borders.add(address)
        elif action == Action.SEGMENT_FREE:
            self.space.borders.discard(address)
        if action in GROWS:
            self.space.give(address, size)
            return True
        return self.space.cut(address, size)

    def _round_requests(self) -> dict[int, tuple[int, int]]:
        """For each requested size, the block's bytes and the smallest remainder that is split off it."""
        requested = np.unique(self.columns.sizes[self.columns.actions == Action.ALLOC])
        rounded = {size: self.rules.round_request(size) for size in requested.tolist()}
        return {size: (block_bytes, self.rules.smallest_rest(block_bytes)) for size, block_bytes in rounded.items()}

    def ends_in(self, final: FinalSegments) -> bool:
        """Whether all events fit and the device now holds exactly `final`."""
        if self.mismatches or int(_reserved_bytes(self.before, self.columns)[-1]) != final.reserved_bytes:
            return False
        blocks = {address: self.held[block] for address, block in (*self.waiting.items(), *self.used.items())}
        return final.holds(blocks, self.starts)


def _reserved_bytes(before: DeviceState, columns: EventColumns) -> Int64s:
    changes = np.empty(len(columns.actions) + 1, dtype=np.int64)
    changes[0] = before.reserved_bytes
    np.multiply(_RESERVES[columns.actions], columns.sizes, out=changes[1:])
    return np.cumsum(changes, out=changes)


def _result(snapshot: Snapshot, device: int, run: _Run, *, complete: bool, verified: bool) -> Replay:
    columns, before = run.columns, run.before.blocks
    actions = columns.actions
    block_bytes, freed = np.array(run.held, dtype=np.int64), np.array(run.freed, dtype=np.int64)
    older = np.array([block.requested_bytes for block in before], dtype=np.int64)
    made = np.flatnonzero(actions == Action.ALLOC)
    requested = np.append(older, columns.sizes[made])
    allocated_by = np.append(np.full(len(older), _MISSING), made)
    freed_by = np.full(len(block_bytes), _MISSING)
    freed_by[freed[freed >= 0]] = np.flatnonzero(actions == Action.FREE_REQUESTED)[freed >= 0]
    # a block that waits for another stream when the recording starts has been freed by the program
    waiting = [index for index, block in enumerate(before) if not block.allocated]
    if waiting:
        requested, block_bytes, allocated_by, freed_by = (
            np.delete(column, waiting) for column in (requested, block_bytes, allocated_by, freed_by)
        )
    older_blocks = [block for block in before if block.allocated]
    changes = np.zeros(len(actions) + 1, dtype=np.int64)
    changes[0] = block_bytes[: len(older_blocks)].sum()
    # an event allocates or frees one block
    changes[made + 1] = block_bytes[len(older_blocks) :]
    known = np.flatnonzero(freed_by >= 0)
    changes[freed_by[known] + 1] = -block_bytes[known]
    return Replay(
        source=snapshot.source,
        device=device,
        trace=snapshot.trace_of(device),
        requested_bytes=requested,
        block_bytes=block_bytes,
        allocated_by=allocated_by,
        freed_by=freed_by,
        allocated_bytes=np.cumsum(changes, out=changes),
        reserved_bytes=_reserved_bytes(run.before, columns),
        older_blocks=older_blocks,
        older_waiting=[block for block in before if not block.allocated],
        complete=complete,
        verified=verified,
        mismatches=run.mismatches,
        segments=snapshot.segments_of(device),
        rules=run.rules,
        failures=tuple(np.flatnonzero(actions == Action.OOM).tolist()),
    )


def _steps(columns: EventColumns) -> Iterator[tuple[int, int, int]]:
    """Action, address and size of the events that move memory; a free_requested with its free_completed is one."""
    for start in range(0, len(columns.actions), _EVENTS_AT_ONCE):
        piece = slice(start, start + _EVENTS_AT_ONCE)
        actions, addresses = columns.actions[piece].copy(), columns.addresses[piece]
        at_once = (actions[:-1] == Action.FREE_REQUESTED) & (actions[1:] == Action.FREE_COMPLETED)
        requests = np.flatnonzero(at_once & (addresses[:-1] == addresses[1:]))
        moves = actions < Action.OOM
        actions[requests], moves[requests + 1] = _FREE, False
        sizes = columns.sizes[piece][moves]
        yield from zip(actions[moves].tolist(), addresses[moves].tolist(), sizes.tolist(), strict=True)
