"""Keep a recording of any length in parts: those around the peak whole, of earlier ones the blocks that live."""

import pickle
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ligerprof.runs.recording.gap import Bridge, Place, Snapshot, allocations, device_count, made_up
from ligerprof.runs.recording.settings import DISK_BYTES
from ligerprof.snapshots.collector import collector_paused
from ligerprof.snapshots.stamp import Stamp

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


class _Content(NamedTuple):
    """What the file of a part has.

    Attributes:
        before: the snapshot's segments where it begins.
        alive: the allocations of the blocks that live there, in order.
        taken: the snapshot at its end, with its events.
    """

    before: Snapshot
    alive: Mapping[Place, Event]
    taken: Snapshot


@dataclass(kw_only=True, slots=True, eq=False)
class _Part:
    """A stretch of a recording.

    Attributes:
        file: None once it is dropped.
        first_step: the step that runs at its beginning.
        begins_step: whether it begins with that step.
        has_all: whether torch's buffer still had its first events.
    """

    file: Path | None
    file_bytes: int
    events: int
    first_step: int
    last_step: int
    begins_step: bool
    has_all: bool


class LostPeak(NamedTuple):
    """A peak in a part whose file could not be written, and the steps that ran in it."""

    peak_bytes: int
    first_step: int
    step: int


class Parts:
    """The parts of a recording, in a folder of files that only this process reads.

    Args:
        folder: of the recording; the files are in a folder inside.
        most_entries: of torch's buffer of events.
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
        self._peak_bytes, self._peak_part = 0, 0
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
            step: the running one.
            peak_bytes: torch's counter.
            begins_step: whether that step only begins, with the next part.

        Raises:
            OSError: the file cannot be written; the events are lost.
        """
        traces = taken.get("device_traces") or ()
        number = len(self._parts)
        part = _Part(
            file=None,
            file_bytes=0,
            events=sum(map(len, traces)),
            first_step=self._step,
            last_step=step - begins_step,
            begins_step=self._begins_step,
            has_all=all(len(trace) < self._most_entries for trace in traces),
        )
        with collector_paused():
            _share(traces)
            content = pickle.dumps(tuple(_Content(self._state, self._alive, taken)), protocol=4)
            self._follow(traces)
        self._state = {**taken, "device_traces": ()}
        self._parts.append(part)
        self._step, self._begins_step = step, begins_step
        if peak_bytes > self._peak_bytes:
            self._peak_bytes, self._peak_part = peak_bytes, number
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / str(number)
        file.write_bytes(content)
        part.file, part.file_bytes = file, len(content)
        self._drop()

    def cross(self, bridge: Bridge, *, peak_bytes: int) -> None:
        """Add events that lead over a stretch without a history.

        Raises:
            OSError: as `add`.
        """
        devices = range(max(device_count(self._state), device_count(bridge.after)))
        traces = [list(made_up(device, self._state, bridge)) for device in devices]
        self.add({**bridge.after, "device_traces": traces}, step=bridge.step, peak_bytes=peak_bytes)

    def skip(self, taken: Snapshot, *, step: int, event: Event, begins_step: bool) -> None:
        """Add a part of which nothing is kept but the blocks that live at its end.

        Args:
            taken: a snapshot there.
            event: what the allocations have that are not known from earlier parts.
            begins_step: as of `add`.
        """
        alive = {}
        for place, found in allocations(taken, event):
            known = self._alive.get(place)
            alive[place] = known if known is not None and _are_same(known, found) else found
        # in the order of allocation
        order = {place: number for number, place in enumerate(self._alive)}
        self._alive = dict(sorted(alive.items(), key=lambda each: order.get(each[0], len(order))))
        self._state = {**taken, "device_traces": ()}
        part = _Part(
            file=None,
            file_bytes=0,
            events=0,
            first_step=self._step,
            last_step=step - begins_step,
            begins_step=self._begins_step,
            has_all=True,
        )
        self._parts.append(part)
        self._step, self._begins_step = step, begins_step

    @property
    def lost_peak(self) -> LostPeak | None:
        """The peak, if the recording lacks it."""
        if not self._parts or self._parts[self._peak_part].file is not None:
            return None
        part = self._parts[self._peak_part]
        return LostPeak(self._peak_bytes, part.first_step, part.last_step)

    def has_peak(self, peak_bytes: int) -> bool:
        """Whether an earlier part reached a peak of so many bytes."""
        return peak_bytes <= self._peak_bytes

    @property
    def is_empty(self) -> bool:
        """Whether it has no parts."""
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
        """Remove the files."""
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
        """Note which blocks live after some events."""
        # the pickled one has its order
        alive = self._alive
        for device, trace in enumerate(traces):
            stamp = ""
            for event in trace:
                action = event["action"]
                stamp = event.get("user_metadata") or stamp
                if action == "alloc":
                    place = device, event["addr"]
                    alive.pop(place, None)
                    # torch stamps the events of one thread; what other threads load belongs to the phase that runs
                    alive[place] = event if event.get("user_metadata") else {**event, "user_metadata": stamp}
                elif action == "free_completed":
                    alive.pop((device, event["addr"]), None)


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
