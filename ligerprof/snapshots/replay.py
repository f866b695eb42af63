"""Replay a device's allocator events into blocks, so that allocated and reserved bytes are right at every moment."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ligerprof.snapshots.events import DeviceState, Event, EventColumns, HeldBlock
from ligerprof.snapshots.reader import Snapshot
from ligerprof.snapshots.rewind import rewind
from ligerprof.snapshots.rules import SizeRules
from ligerprof.snapshots.stamp import Stamp

Int64s = npt.NDArray[np.int64]
_NOT_IN_TRACE = -1
_NO_BLOCK = -1
_OUT_OF_MEMORY = "oom"


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
    trace: Sequence[Event]
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
    complete = run.mismatches == 0 and (not snapshot.segments or run.state().same_as(final))
    if not complete:
        run = _Run(rewind(trace, columns, final, rules), rules)
        run.play(columns)
    replayed = run.result(device, trace, complete=complete, verified=run.mismatches == 0 and run.state().same_as(final))
    first_oom = columns.actions.index(_OUT_OF_MEMORY) if _OUT_OF_MEMORY in columns.actions else None
    return replace(replayed, out_of_memory=first_oom)


def state_at(snapshot: Snapshot, replayed: Replay, moment: int) -> DeviceState:
    """What a replayed device held at a moment: replays it up to there once more."""
    where, rules = snapshot.source, SizeRules.from_settings(snapshot.settings)
    before = DeviceState()
    if not replayed.complete:
        final = DeviceState.from_segments(snapshot.segments_of(replayed.device), where)
        before = rewind(replayed.trace, EventColumns.of(replayed.trace, where), final, rules)
    run = _Run(before, rules)
    run.play(EventColumns.of(replayed.trace[:moment], where))
    return run.state()


class _Run:
    """The allocator's state while its events are replayed."""

    def __init__(self, before: DeviceState, rules: SizeRules) -> None:
        self.rules = rules
        self.space = before.space.copy()
        self.starts, self.ends = self.space.starts, self.space.ends
        self.rounded: dict[int, tuple[int, int]] = {}
        self.start_reserved_bytes = before.reserved_bytes
        self.older = [before.blocks[address] for address in sorted(before.blocks)]
        # address to block index: in use, and given back but not yet free
        self.used = {block.address: index for index, block in enumerate(self.older) if block.allocated}
        self.waiting = {block.address: index for index, block in enumerate(self.older) if not block.allocated}
        self.requested = [block.requested_bytes for block in self.older]
        self.held = [block.block_bytes for block in self.older]
        self.allocated_by = [_NOT_IN_TRACE] * len(self.older)
        self.freed_by = [_NOT_IN_TRACE] * len(self.older)
        self.reserved_by: list[tuple[int, int]] = []
        self.mismatches = 0

    def play(self, columns: EventColumns, *, stop_at_mismatch: bool = False) -> None:
        """Replay every event, or up to the first that does not fit the ones before it."""
        steps: dict[str, Callable[[int, int, int], bool]] = {
            "alloc": self._alloc,
            "segment_alloc": self._segment_alloc,
            "segment_free": self._segment_free,
            "segment_map": self._segment_map,
            "segment_unmap": self._segment_unmap,
        }
        used, waiting, freed_by, held = self.used, self.waiting, self.freed_by, self.held
        give = self.space.give
        events = zip(columns.actions, columns.addresses, columns.sizes, strict=True)
        # both steps of giving back stand in the loop itself: a trace has a million of them
        for index, (action, address, size) in enumerate(events):
            if action == "free_completed":
                block = waiting.pop(address, _NO_BLOCK)
                if fits := block >= 0:
                    give(address, held[block])
            elif action == "free_requested":
                block = used.pop(address, _NO_BLOCK)
                if fits := block >= 0:
                    freed_by[block] = index
                    waiting[address] = block
            else:
                step = steps.get(action)
                fits = step is None or step(address, size, index)
            if not fits:
                self.mismatches += 1
                if stop_at_mismatch:
                    return

    def _alloc(self, address: int, size: int, index: int) -> bool:
        block_bytes, splits_from = self.rounded.get(size) or self._round(size)
        free = self.starts.pop(address, _NOT_IN_TRACE)
        rest = free - block_bytes
        if rest >= splits_from:
            self.starts[address + block_bytes] = rest
            self.ends[address + free] = address + block_bytes
        elif rest >= 0:
            block_bytes = free
            del self.ends[address + free]
        elif free >= 0:
            self.starts[address] = free
        self.used[address] = len(self.held)
        self.requested.append(size)
        self.held.append(block_bytes)
        self.allocated_by.append(index)
        self.freed_by.append(_NOT_IN_TRACE)
        return rest >= 0

    def _round(self, size: int) -> tuple[int, int]:
        """Bytes of the block that serves a request, and the smallest rest that is split off it."""
        block_bytes = self.rules.round_request(size)
        self.rounded[size] = block_bytes, self.rules.smallest_rest(block_bytes)
        return self.rounded[size]

    def _segment_alloc(self, address: int, size: int, index: int) -> bool:
        self.space.borders.add(address)
        return self._segment_map(address, size, index)

    def _segment_map(self, address: int, size: int, index: int) -> bool:
        self.space.give(address, size)
        self.reserved_by.append((index, size))
        return True

    def _segment_free(self, address: int, size: int, index: int) -> bool:
        self.space.borders.discard(address)
        return self._segment_unmap(address, size, index)

    def _segment_unmap(self, address: int, size: int, index: int) -> bool:
        self.reserved_by.append((index, -size))
        return self.space.cut(address, size)

    def state(self) -> DeviceState:
        """What the device holds now; stacks and requests left out."""
        held = {**self.waiting, **self.used}
        blocks = {
            address: HeldBlock(address=address, requested_bytes=self.requested[block], block_bytes=self.held[block])
            for address, block in held.items()
        }
        reserved_bytes = self.start_reserved_bytes + sum(size for _, size in self.reserved_by)
        return DeviceState(space=self.space, blocks=blocks, reserved_bytes=reserved_bytes)

    def result(self, device: int, trace: Sequence[Event], *, complete: bool, verified: bool) -> Replay:
        block_bytes, requested = _column(self.held), _column(self.requested)
        allocated_by, freed_by = _column(self.allocated_by), _column(self.freed_by)
        # what waited for another stream at the start was allocated before the trace, not in it
        keep = np.ones(len(self.held), dtype=bool)
        keep[[index for index, block in enumerate(self.older) if not block.allocated]] = False
        older, within = keep & (allocated_by < 0), keep & (allocated_by >= 0)
        freed = keep & (freed_by >= 0)
        changes = np.zeros(len(trace) + 1, dtype=np.int64)
        changes[0] = block_bytes[older].sum()
        # an event makes or frees one block
        changes[allocated_by[within] + 1] = block_bytes[within]
        changes[freed_by[freed] + 1] = -block_bytes[freed]
        reserved = np.zeros(len(trace) + 1, dtype=np.int64)
        reserved[0] = self.start_reserved_bytes
        for index, size in self.reserved_by:
            reserved[index + 1] += size
        return Replay(
            device=device,
            trace=trace,
            requested_bytes=requested[keep],
            block_bytes=block_bytes[keep],
            allocated_by=allocated_by[keep],
            freed_by=freed_by[keep],
            allocated_bytes=np.cumsum(changes),
            reserved_bytes=np.cumsum(reserved),
            older_blocks=[block for block in self.older if block.allocated],
            complete=complete,
            verified=verified,
            mismatches=self.mismatches,
        )


def _column(values: list[int]) -> Int64s:
    return np.array(values, dtype=np.int64)
