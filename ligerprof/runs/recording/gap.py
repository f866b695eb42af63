"""Join two recordings of one process, between which the allocator's history was off.

The snapshots at both ends show which blocks and segments a device had there. Events between them are made up so that a
replay of the joined recording passes from the one state to the other: what is gone is freed, what is new is allocated.
An allocation that was made up is stamped with the phase that gives its block the role that is known of it: gradients
and optimizer states, by the addresses of their tensors. Of all others, nothing is known but their size.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ligerprof.roles import Phase
from ligerprof.snapshots.stamp import Stamp

Snapshot = Mapping[str, Any]
# device and address of a tensor's storage
Place = tuple[int, int]
_ALLOCATED, _INACTIVE = "active_allocated", "inactive"
# an event of a forward pass without a stack: its block is unattributed
_UNKNOWN = Phase.FORWARD
_ORDER = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


class Bridge(NamedTuple):
    """The end of a gap.

    Attributes:
        after: the snapshot at its end, before the history was on again.
        phases: of the tensors whose role is known, the phase that allocates such tensors.
        step: the last training step within the gap.
        time_us: its end, by the clock of events.
        failure: the event of an allocation that failed there, with its device.
        known: the allocations of blocks, in order, where a recording has them.
    """

    after: Snapshot
    phases: Mapping[Place, Phase]
    step: int
    time_us: int
    failure: Mapping[str, Any] | None = None
    known: Mapping[Place, Mapping[str, Any]] = {}


def device_count(snapshot: Snapshot) -> int:
    """The number of devices up to the last one that has segments."""
    return max((segment["device"] + 1 for segment in snapshot["segments"]), default=0)


class _Block(NamedTuple):
    size_bytes: int
    block_bytes: int
    stream: int
    allocated: bool
    frames: Sequence[Mapping[str, Any]]

    @property
    def has_frames(self) -> bool:
        return bool(self.frames)

    def is_same(self, later: "_Block") -> bool:
        """Whether a block of a later snapshot is this one; blocks of the gap have no frames."""
        return self.size_bytes == later.size_bytes and (later.has_frames or not self.has_frames)


def _pieces(segment: Mapping[str, Any]) -> Iterator[tuple[int, _Block | None, int]]:
    """Start, block and size of the pieces of a segment; None for a free one."""
    end = segment["address"]
    for piece in segment["blocks"]:
        start, size_bytes = piece.get("address", end), piece["size"]
        block = _Block(
            size_bytes=piece.get("requested_size", size_bytes),
            block_bytes=size_bytes,
            stream=segment["stream"],
            allocated=piece["state"] == _ALLOCATED,
            frames=piece.get("frames") or (),
        )
        yield start, None if piece["state"] == _INACTIVE else block, size_bytes
        end = start + size_bytes


def allocations(snapshot: Snapshot, event: Mapping[str, Any]) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The blocks that a device has at the end of a snapshot, as allocations; `event` has what is equal in all."""
    for segment in snapshot["segments"]:
        for address, block, _ in _pieces(segment):
            if block is not None:
                own = {"addr": address, "size": block.size_bytes, "stream": block.stream, "frames": [*block.frames]}
                yield (segment["device"], address), {"action": "alloc", **event, **own}


def _blocks(segments: Sequence[Mapping[str, Any]]) -> dict[int, _Block]:
    return {start: block for segment in segments for start, block, _ in _pieces(segment) if block is not None}


class _Events:
    """Makes events of a gap."""

    def __init__(self, bridge: Bridge) -> None:
        self._time_us = bridge.time_us
        self._stamps = {phase: Stamp(step=bridge.step, phase=phase).to_text() for phase in Phase}

    def event(
        self, action: str, address: int, size_bytes: int, stream: int, phase: Phase = Phase.OUTSIDE
    ) -> dict[str, Any]:
        place = {"action": action, "addr": address, "size": size_bytes, "stream": stream}
        return {**place, "time_us": self._time_us, "user_metadata": self._stamps[phase], "frames": []}

    def free(self, address: int, block: _Block, *, completed: bool = True) -> Iterator[dict[str, Any]]:
        """Free a block, or let it wait for another stream."""
        if block.allocated:
            yield self.event("free_requested", address, block.size_bytes, block.stream)
        if completed:
            yield self.event("free_completed", address, block.size_bytes, block.stream)

    def alloc(
        self, address: int, block: _Block, phase: Phase, known: Mapping[str, Any] | None = None
    ) -> Iterator[dict[str, Any]]:
        """Map a block's memory alone, so that it gets exactly that, and allocate it; by the known event, if any."""
        mapped = self.event("segment_map", address, block.block_bytes, block.stream, phase)
        if known is None:
            yield mapped
            yield self.event("alloc", address, block.size_bytes, block.stream, phase)
        else:
            yield {**mapped, "user_metadata": known["user_metadata"]}
            yield dict(known)
        if not block.allocated:
            yield self.event("free_requested", address, block.size_bytes, block.stream, phase)


def made_up(device: int, before: Snapshot, bridge: Bridge) -> Iterator[dict[str, Any]]:
    """The events that lead from the one state to the other."""
    events = _Events(bridge)
    segments = [
        [segment for segment in snapshot["segments"] if segment["device"] == device]
        for snapshot in (before, bridge.after)
    ]
    old, new = map(_blocks, segments)
    kept = {address for address, block in old.items() if address in new and block.is_same(new[address])}
    for address, block in old.items():
        if address not in kept:
            yield from events.free(address, block)
        elif block.allocated and not new[address].allocated:
            yield from events.free(address, block, completed=False)
    for change in _segment_changes(*segments):
        yield events.event(*change)
    free: list[tuple[int, int, int]] = []
    made: list[tuple[Phase, int]] = []
    for segment in segments[1]:
        for stretch in _changed_stretches(segment, kept):
            size_bytes = sum(size for _, _, size in stretch)
            yield events.event("segment_unmap", stretch[0][0], size_bytes, segment["stream"])
            free += [(start, size, segment["stream"]) for start, block, size in stretch if block is None]
            made += [
                (bridge.phases.get((device, start), _UNKNOWN), start)
                for start, block, _ in stretch
                if block is not None
            ]
    places = {place: number for number, place in enumerate(bridge.known)}
    made.sort(key=lambda each: (places.get((device, each[1]), len(places)), _ORDER.index(each[0]), each[1]))
    for phase, address in made:
        yield from events.alloc(address, new[address], phase, bridge.known.get((device, address)))
    for start, size_bytes, stream in free:
        yield events.event("segment_map", start, size_bytes, stream)
    failure = bridge.failure
    if failure is not None and failure["device"] == device:
        yield {**failure, "time_us": bridge.time_us}


_Pieces = list[tuple[int, _Block | None, int]]


def _changed_stretches(segment: Mapping[str, Any], kept: set[int]) -> Iterator[_Pieces]:
    """The pieces between kept blocks, where one of them is a new block."""
    stretch: _Pieces = []
    for piece in (*_pieces(segment), None):
        if piece is not None and piece[0] not in kept:
            stretch.append(piece)
            continue
        if any(block is not None for _, block, _ in stretch):
            yield stretch
        stretch = []


def _segment_changes(
    old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, int, int, int]]:
    """Action, address, size and stream of what the driver freed and gave."""
    fixed = [
        {(each["address"], each["total_size"]): each["stream"] for each in segments if not each.get("is_expandable")}
        for segments in (old, new)
    ]
    ranges = [[each for each in segments if each.get("is_expandable")] for segments in (old, new)]
    for (address, size_bytes), stream in fixed[0].items():
        if (address, size_bytes) not in fixed[1]:
            yield "segment_free", address, size_bytes, stream
    for address, size_bytes, stream in _less(ranges[0], ranges[1]):
        yield "segment_unmap", address, size_bytes, stream
    for (address, size_bytes), stream in fixed[1].items():
        if (address, size_bytes) not in fixed[0]:
            yield "segment_alloc", address, size_bytes, stream
    for address, size_bytes, stream in _less(ranges[1], ranges[0]):
        yield "segment_map", address, size_bytes, stream


def _less(segments: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, int, int]]:
    """The parts of mapped ranges that are not in others."""
    taken = sorted((each["address"], each["address"] + each["total_size"]) for each in others)
    for segment in segments:
        start, end = segment["address"], segment["address"] + segment["total_size"]
        for first, last in taken:
            if last > start and first < end:
                if first > start:
                    yield start, first - start, segment["stream"]
                start = max(start, last)
        if start < end:
            yield start, end - start, segment["stream"]
