"""Keep a recording of any length in parts: those around the peak whole, of earlier ones the blocks that live.

The snapshots at both ends show which blocks and segments a device had there. Events between them are made up so that a
replay of the joined recording passes from the one state to the other: what is gone is freed, what is new is allocated.
An allocation that was made up is stamped with the phase that gives its block the role that is known of it: gradients
and optimizer states, by the addresses of their tensors. Of all others, nothing is known but their size.
"""

import pickle
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ligerprof.roles import Phase
from ligerprof.runs.recording.settings import DISK_BYTES
from ligerprof.runs.recording.summary import LatePeak
from ligerprof.snapshots.collector import collector_paused
from ligerprof.snapshots.stamp import Stamp
from ligerprof.torch_memory.allocator.settings import MIN_BLOCK_BYTES

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

    def is_same(self, later: "_Block") -> bool:
        """Whether a block of a later snapshot is this one; blocks of the gap have no frames."""
        return self.size_bytes == later.size_bytes and bool(later.frames or not self.frames)


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


Event = dict[str, Any]
# reading torch's counters takes 12 to 60 us
_SECONDS_BETWEEN_CHECKS = 0.01
# torch makes a Python object of each event when a part ends: about a kilobyte
_MOST_EVENTS_OF_PART, _LEAST_EVENTS_OF_PART = 200_000, 100_000
# a recording is at most this long, except for the step of the peak
_MOST_EVENTS, _MOST_EVENTS_OF_STEP = 1_000_000, 4_000_000
_FOLDER = "parts"
# frames that distinguish most stacks
_TELLING = (0, 4, 8, 16, 32)
_TEXTS = ("user_metadata", "compile_context")


@dataclass(kw_only=True, slots=True, eq=False)
class _Part:
    """A stretch of a recording.

    Attributes:
        file: None once it is dropped.
        first_step: the step that runs at its beginning.
        has_all: whether torch's buffer still had its first events.
    """

    events: int
    first_step: int
    last_step: int
    begins_step: bool
    has_all: bool
    file: Path | None = None
    file_bytes: int = 0


class Parts:
    """The parts of a recording, in a folder of files that only this process reads.

    Args:
        folder: of the recording; the files are in a folder inside.
        disk_bytes: the most bytes of all files. Beyond it, parts are dropped: the oldest first, those of the step of
            the peak and of the running step last.
        keeps_all: whether all parts that fit on the disk are of use, not only those around the peak.
    """

    def __init__(
        self, folder: Path, *, most_entries: int, disk_bytes: int = DISK_BYTES, keeps_all: bool = False
    ) -> None:
        self._folder = folder / _FOLDER
        self._most_entries, self._disk_bytes, self._keeps_all = most_entries, disk_bytes, keeps_all
        self._parts: list[_Part] = []
        self._state: Snapshot = {"segments": []}
        self._alive: dict[Place, Event] = {}
        self.peak_bytes, self._peak_part = 0, 0
        # allocated bytes that each phase reached at least; what the allocator does not split is not in them
        self.phase_peaks: dict[Phase, int] = {}
        self._events = 0
        self._due = 0.0
        self._step, self._begins_step = 0, True

    def is_due(self, events: Callable[[], int], *, begins_step: bool) -> bool:
        """Whether the buffer has enough events for a part.

        Args:
            events: callback that returns the number of events so far.
        """
        now = time.monotonic()
        if now < self._due:
            return False
        self._due = now + _SECONDS_BETWEEN_CHECKS
        least = _LEAST_EVENTS_OF_PART if begins_step else _MOST_EVENTS_OF_PART
        return bool(events() - self._events >= least)

    def restart(self, events: int) -> None:
        """Count events from here on."""
        self._events = events

    def add(self, taken: Snapshot, *, step: int, peak_bytes: int, begins_step: bool = False) -> None:
        """Add the events of a snapshot; the buffer has to be cleared then.

        Args:
            begins_step: whether that step only begins, with the next part.

        Raises:
            OSError: the file cannot be written; the events are lost.
        """
        traces = taken.get("device_traces") or ()
        number = len(self._parts)
        with collector_paused():
            _share(traces)
            # the segments where it begins, the allocations of the blocks that live there, in order, and its events
            content = pickle.dumps((self._state, self._alive, taken), protocol=4)
            self._follow(traces)
        has_all = all(len(trace) < self._most_entries for trace in traces)
        part = self._append(taken, step, begins_step=begins_step, events=sum(map(len, traces)), has_all=has_all)
        if peak_bytes > self.peak_bytes:
            self.peak_bytes, self._peak_part = peak_bytes, number
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / str(number)
        file.write_bytes(content)
        part.file, part.file_bytes = file, len(content)
        self._drop()

    def cross(self, bridge: Bridge, *, peak_bytes: int) -> None:
        """Add events that lead over a stretch without a history; raises OSError as `add` does."""
        devices = range(max(device_count(self._state), device_count(bridge.after)))
        traces = [list(made_up(device, self._state, bridge)) for device in devices]
        self.add({**bridge.after, "device_traces": traces}, step=bridge.step, peak_bytes=peak_bytes)

    def skip(self, taken: Snapshot, *, step: int, event: Event, begins_step: bool) -> None:
        """Add a part of which nothing is kept but the blocks that live at its end.

        Args:
            event: what the allocations have that are not known from earlier parts.
        """
        alive = {}
        for place, found in allocations(taken, event):
            known = self._alive.get(place)
            alive[place] = known if known is not None and _are_same(known, found) else found
        # in the order of allocation
        order = {place: number for number, place in enumerate(self._alive)}
        self._alive = dict(sorted(alive.items(), key=lambda each: order.get(each[0], len(order))))
        self._append(taken, step, begins_step=begins_step, events=0, has_all=True)

    def _append(self, taken: Snapshot, step: int, *, begins_step: bool, events: int, has_all: bool) -> _Part:
        part = _Part(
            events=events,
            first_step=self._step,
            last_step=step - begins_step,
            begins_step=self._begins_step,
            has_all=has_all,
        )
        self._parts.append(part)
        self._state = {**taken, "device_traces": ()}
        self._step, self._begins_step = step, begins_step
        return part

    @property
    def lost_peak(self) -> LatePeak | None:
        """The peak, if the file of its part could not be written, with the steps that ran in the part."""
        if not self._parts or self._parts[self._peak_part].file is not None:
            return None
        part = self._parts[self._peak_part]
        return LatePeak(peak_bytes=self.peak_bytes, first_step=part.first_step, step=part.last_step)

    @property
    def is_empty(self) -> bool:
        return not self._parts

    def joined(self, *, at_end: bool) -> tuple[Snapshot, tuple[int, int] | None]:
        """One snapshot of the parts around the peak, and the first and the last step if others are left out.

        Args:
            at_end: around the last event instead, where memory ran out.

        Raises:
            OSError: a file cannot be read.
        """
        center = len(self._parts) - 1 if at_end else self._peak_part
        numbers = [number for number, part in enumerate(self._parts) if part.file is not None]
        center = min(numbers, key=lambda number: abs(number - center), default=center)
        first, last = self._window(center)
        chosen = self._parts[first : last + 1]
        notes: list[Any] = []
        traces: list[list[Event]] = []
        frames: dict[tuple[Any, ...], Any] = {}
        taken: Snapshot = {}
        with collector_paused():
            for number, part in enumerate(chosen):
                if part.file is None:
                    raise OSError(f"part {first + number} of the recording is lost")
                before, alive, taken = pickle.loads(part.file.read_bytes())  # noqa: S301 - from this process
                own = [list(trace) for trace in taken.get("device_traces") or ()]
                if number == 0 and first and part.has_all:
                    traces = _prefix(before, alive)
                traces += [[] for _ in range(len(own) - len(traces))]
                for device, events in enumerate(own):
                    traces[device] += events
                notes += taken.get("external_annotations") or ()
            _unite(traces, frames)
        unique = list({repr(note): note for note in notes}.values())
        found = {**taken, "device_traces": traces, **({"external_annotations": unique} if unique else {})}
        is_cut = first > 0 or last < len(self._parts) - 1
        return found, (chosen[0].first_step, chosen[-1].last_step) if is_cut else None

    def remove(self) -> None:
        self._parts.clear()
        self._alive.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _window(self, center: int) -> tuple[int, int]:
        """The first and the last part to join: the step of the peak, then what precedes and follows it."""
        parts = self._parts
        first = last = center
        events = parts[center].events
        steps = range(parts[center].first_step, parts[center].last_step + 1)

        def may_add(number: int, neighbour: int, most: int) -> bool:
            if not 0 <= number < len(parts) or parts[number].file is None or not parts[max(number, neighbour)].has_all:
                return False
            return self._keeps_all or events + parts[number].events <= most

        for within, most in ((True, _MOST_EVENTS_OF_STEP), (False, _MOST_EVENTS)):
            while may_add(first - 1, first, most) and (not within or parts[first - 1].last_step in steps):
                first -= 1
                events += parts[first].events
            while may_add(last + 1, last, most) and (not within or parts[last + 1].first_step in steps):
                last += 1
                events += parts[last].events
        # whole steps
        while first < center and not parts[first].begins_step and parts[first].last_step not in steps:
            first += 1
        return first, last

    def _drop(self) -> None:
        """Remove files until the rest fits on the disk."""
        surplus = sum(part.file_bytes for part in self._parts if part.file is not None) - self._disk_bytes
        peak = self._parts[self._peak_part]
        near = {peak.first_step, peak.last_step, self._step}
        kept = [part for part in self._parts[:-1] if part.file is not None and part is not peak]
        kept.sort(key=lambda part: part.last_step in near)
        for part in kept:
            if surplus <= 0:
                return
            surplus -= part.file_bytes
            if part.file is not None:
                with suppress(OSError):
                    part.file.unlink()
                part.file = None

    def _follow(self, traces: Sequence[Sequence[Event]]) -> None:
        """Note which blocks live after some events, and what phases reach."""
        # the pickled one has its order
        alive = self._alive
        for device, trace in enumerate(traces):
            stamp = ""
            held, highest = _held_bytes(self._state, device), dict[str, int]()
            allocated_bytes = sum(held.values())
            for event in trace:
                action = event["action"]
                stamp = event.get("user_metadata") or stamp
                if action == "free_requested":
                    allocated_bytes -= held.pop(event["addr"], 0)
                elif action == "alloc":
                    held[event["addr"]] = size_bytes = -(-event["size"] // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
                    allocated_bytes += size_bytes
                    if allocated_bytes > highest.get(stamp, 0):
                        highest[stamp] = allocated_bytes
                    place = device, event["addr"]
                    alive.pop(place, None)
                    # torch stamps the events of one thread; what other threads load belongs to the phase that runs
                    alive[place] = event if event.get("user_metadata") else {**event, "user_metadata": stamp}
                elif action == "free_completed":
                    alive.pop((device, event["addr"]), None)
            for text, size_bytes in highest.items():
                found = Stamp.parse(text)
                if found is not None and size_bytes > self.phase_peaks.get(found.phase, 0):
                    self.phase_peaks[found.phase] = size_bytes


def _held_bytes(state: Snapshot, device: int) -> dict[int, int]:
    """The bytes of a device's allocated blocks, by address."""
    segments = [segment for segment in state["segments"] if segment["device"] == device]
    return {address: block.block_bytes for address, block in _blocks(segments).items() if block.allocated}


def _are_same(event: Event, other: Event) -> bool:
    """Whether two allocations at one address are probably one; without stacks, events lack frames."""
    return bool(event["size"] == other["size"] and list(event.get("frames") or ()) == other["frames"])


def _share(traces: Sequence[Sequence[Event]]) -> None:
    """Let equal stacks be one list, and equal texts one object, which takes memory and files a fifth of theirs."""
    known: dict[int, Any] = {}
    groups: dict[tuple[int, ...], list[Any]] = {}
    texts: dict[str, str] = {}
    for trace in traces:
        for event in trace:
            frames = event.get("frames")
            if frames:
                shared = known.get(id(frames))
                if shared is None:
                    shared = known[id(frames)] = _equal_stack(frames, groups)
                # the list stays alive, so that its id stays its own
                if shared is not frames:
                    event["frames"] = shared
            for key in _TEXTS:
                text = event.get(key)
                if text is not None:
                    event[key] = texts.setdefault(text, text)


def _equal_stack(frames: Any, groups: dict[tuple[int, ...], list[Any]]) -> Any:
    """The first stack that equals this one; within a snapshot, equal frames are one object."""
    size = len(frames)
    group = groups.setdefault((size, *(id(frames[place]) for place in _TELLING if place < size)), [])
    for other in group:
        if other == frames:
            return other
    group.append(frames)
    return frames


def _unite(traces: Sequence[list[Event]], frames: dict[tuple[Any, ...], Any]) -> None:
    """Share keys, stacks and frames between parts; only events with the same keys are read as one table."""
    stacks: dict[tuple[int, ...], Any] = {}
    known: dict[int, Any] = {}
    for trace in traces:
        for index, loaded in enumerate(trace):
            event = trace[index] = dict(zip(map(sys.intern, loaded), loaded.values(), strict=True))
            stack = event.get("frames")
            if not stack:
                continue
            shared = known.get(id(stack))
            if shared is None:
                united = [frames.setdefault(tuple(frame.items()), frame) for frame in stack]
                shared = known[id(stack)] = stacks.setdefault(tuple(map(id, united)), united)
            event["frames"] = shared


def _prefix(before: Snapshot, alive: Mapping[Place, Event]) -> list[list[Event]]:
    """Events that lead from an empty device to a part: those of the blocks that live there, before the first step."""
    known = {place: {**event, "user_metadata": _before_steps(event)} for place, event in alive.items()}
    first_us = min((event.get("time_us", 0) for event in known.values()), default=0)
    bridge = Bridge(after=before, phases={}, step=0, time_us=first_us, known=known)
    return [list(made_up(device, {"segments": []}, bridge)) for device in range(device_count(before))]


def _before_steps(event: Event) -> Any:
    stamp = Stamp.parse(event.get("user_metadata") or "")
    if stamp is None:
        return event.get("user_metadata")
    tail = event["user_metadata"].split(";", 3)[3]
    return f"{Stamp.prefix(step=0, phase=stamp.phase)}{tail}"
