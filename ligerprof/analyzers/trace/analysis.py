"""The report of a trace (busy and idle time per GPU, kernels by class, host time by layer), and of two compared."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ligerprof.analyzers.trace.events import ABSENT, KERNEL, Events, Numbers, Times, Trace, first_match
from ligerprof.analyzers.trace.times import (
    CAUSES,
    SIZE_BOUNDS_US,
    GapCause,
    Gaps,
    HostLayer,
    KernelClass,
    WorkPhase,
    calls_by_layer,
    clip,
    find_gaps,
    group_indices,
    host_layers,
    kernel_class,
    length,
    union,
    work_phases,
)
from ligerprof.errors import TraceFormatError
from ligerprof.serialization import JsonKeys, document, select, to_json
from ligerprof.words import WordT

# nanoseconds, the resolution of a trace
_DIGITS = 9


@dataclass(frozen=True, kw_only=True, slots=True)
class GapGroup:
    """The gaps of one cause and size, in [from_seconds, below_seconds); the last range has no upper bound."""

    cause: GapCause
    from_seconds: float
    below_seconds: float | None
    count: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LargeGap:
    """One gap, with the work that ended it.

    Attributes:
        start_seconds: time since the window's start.
        next_kernel: name of the work that ended the gap, "" at the window's end.
        operator: the operator that launched this work, "" if unknown.
    """

    start_seconds: float
    seconds: float
    cause: GapCause
    next_kernel: str
    operator: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceUse:
    """Activity of one GPU within the window.

    Attributes:
        kernels: number of kernels that ran, at least in part, within the window.
        copies: as `kernels`, for copies and fills.
        busy_seconds: time with at least one kernel running.
        occupied_seconds: time with at least one kernel, copy or fill running; with the gaps it
            sums to the window.
        largest_gaps: the largest first.
    """

    device: int
    window_seconds: float
    streams: int
    kernels: int
    copies: int
    busy_seconds: float
    occupied_seconds: float
    gaps: tuple[GapGroup, ...]
    largest_gaps: tuple[LargeGap, ...]

    @property
    def busy_share(self) -> float:
        """Share of the window with a kernel running."""
        return self.busy_seconds / self.window_seconds

    @property
    def occupied_share(self) -> float:
        """Share of the window with a kernel, copy or fill running."""
        return self.occupied_seconds / self.window_seconds

    def to_json(self) -> dict[str, Any]:
        """One entry of `devices`."""
        return {
            **select(self, "device", "streams", "kernels", "copies", "busy_seconds", "busy_share"),
            **select(self, "occupied_seconds", "occupied_share", "gaps", "largest_gaps"),
        }

    def gap_seconds(self, cause: GapCause) -> float:
        """Idle time with this cause."""
        return sum(gap.seconds for gap in self.gaps if gap.cause is cause)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkTime:
    """Summed durations of a group of kernels, copies and fills within the window."""

    count: int
    seconds: float

    @property
    def mean_seconds(self) -> float:
        """Average duration; the count must not be 0."""
        return self.seconds / self.count


NO_WORK = WorkTime(count=0, seconds=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelTime(WorkTime):
    """All runs of one kernel; `operator` launched most of its time, "" if unknown."""

    name: str
    kind: KernelClass
    operator: str
    longest_seconds: float

    def to_json(self) -> dict[str, Any]:
        """One entry of `top_kernels`."""
        return select(self, "name", "class=kind", "operator", "count", "seconds", "mean_seconds", "longest_seconds")


@dataclass(frozen=True, kw_only=True, slots=True)
class Launches:
    """The host's calls that launch kernels, copies and fills.

    Attributes:
        count: calls that began within the window.
        seconds: their total duration.
        median_delay_seconds: time from the start of a call to the start of its work: short if the
            GPU waits for the host, long if the host runs ahead; None if the trace has no calls for its work.
    """

    count: int
    seconds: float
    median_delay_seconds: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceReport(JsonKeys):
    """The result of `ligerprof trace`.

    Attributes:
        window_seconds: from the start of the first profiled step to the end of the last.
        steps: names of the profiled steps; empty if the trace has none and the window is the whole trace.
        devices: sorted by index.
        phases: every phase; None if the trace has no spans of phases.
        kernels: every kernel, copy and fill by name, largest time first.
        host: seconds by layer, which sum to the window; None without launching calls.
        notes: caveats, one sentence each.
    """

    source: str
    window_seconds: float
    steps: tuple[str, ...]
    devices: tuple[DeviceUse, ...]
    launches: Launches
    classes: Mapping[KernelClass, WorkTime]
    phases: Mapping[WorkPhase, WorkTime] | None
    kernels: tuple[KernelTime, ...]
    host: Mapping[HostLayer, float] | None
    notes: tuple[str, ...]

    @property
    def kernel_count(self) -> int:
        """Number of kernels on all devices within the window, without copies and fills."""
        return sum(device.kernels for device in self.devices)

    @property
    def busiest(self) -> DeviceUse:
        """The device with the most busy time."""
        return max(self.devices, key=lambda device: device.busy_seconds)

    @property
    def idle_seconds(self) -> dict[GapCause, float]:
        """Idle time of the busiest device by cause."""
        return {cause: self.busiest.gap_seconds(cause) for cause in GapCause}

    def to_json(self, *, top: int | None = None) -> dict[str, Any]:
        """The object of `ligerprof trace --json`, with the `top` kernels; None lists all."""
        host = {
            layer.value: {
                "seconds": time,
                "seconds_per_kernel": time / self.kernel_count if self.kernel_count else None,
            }
            for layer, time in (self.host or {}).items()
        }
        return document(
            "trace",
            select(self, "source", "window_seconds", "steps", "kernels=kernel_count"),
            select(self, *(f"gpu_{name}=busiest.{name}" for name in ("busy_seconds", "busy_share", "occupied_share"))),
            select(self, "devices", "launches", "classes", "phases"),
            {"top_kernels": to_json(self.kernels[:top]), "host": host or None},
            select(self, "notes"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelChange:
    """One kernel in two traces; `kernel` is the second trace's, or the first's if it ran only there."""

    kernel: KernelTime
    before: WorkTime
    after: WorkTime

    @property
    def difference_seconds(self) -> float:
        """Time in the second trace less time in the first, to the nanosecond."""
        return _less(self.after.seconds, self.before.seconds)

    def to_json(self) -> dict[str, Any]:
        """One entry of `kernels_by_change`."""
        figures = (f"{trace}_{name}={trace}.{name}" for name in ("count", "seconds") for trace in ("before", "after"))
        return select(self, "kernel.name", "class=kernel.kind", *figures, "difference_seconds")


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceDifference:
    """The reports of two traces."""

    before: TraceReport
    after: TraceReport

    def kernels(self) -> tuple[KernelChange, ...]:
        """Every kernel, matched by its full name, the largest change in time first."""
        before, after = ({kernel.name: kernel for kernel in trace.kernels} for trace in (self.before, self.after))
        changes = [
            KernelChange(kernel=kernel, before=before.get(name, NO_WORK), after=after.get(name, NO_WORK))
            for name, kernel in {**before, **after}.items()
        ]
        return tuple(sorted(changes, key=lambda change: -abs(change.difference_seconds)))

    def to_json(self, *, top: int | None = None) -> dict[str, Any]:
        """The object of `ligerprof trace A B --json`, with the `top` kernels; None lists all."""
        before, after = self.before, self.after
        difference = {
            "window_seconds": _less(after.window_seconds, before.window_seconds),
            "kernels": after.kernel_count - before.kernel_count,
            "launches": after.launches.count - before.launches.count,
            "gpu_busy_seconds": _less(after.busiest.busy_seconds, before.busiest.busy_seconds),
            "gpu_busy_share": after.busiest.busy_share - before.busiest.busy_share,
            "idle_seconds": _changes(before.idle_seconds, after.idle_seconds),
            "classes": _changes(before.classes, after.classes),
            "phases": _changes(before.phases, after.phases),
            "host": _changes(before.host, after.host),
            "kernels_by_change": [change.to_json() for change in self.kernels()[:top]],
        }
        traces = [trace.to_json(top=top) for trace in (before, after)]
        return document("trace", {"traces": traces, "difference": difference})


def _less(after: float, before: float) -> float:
    return round(after - before, _DIGITS)


def _changes(before: Mapping[Any, Any] | None, after: Mapping[Any, Any] | None) -> dict[str, float] | None:
    """After less before, in seconds; None if a trace lacks the figures."""
    if before is None or after is None:
        return None
    return {word.value: _less(_seconds_of(after[word]), _seconds_of(before[word])) for word in before}


def _seconds_of(time: WorkTime | float) -> float:
    return time.seconds if isinstance(time, WorkTime) else time


_STEP = re.compile("^ProfilerStep#")
_LARGEST_GAPS = 100


def analyze(trace: Trace) -> TraceReport:
    """Report what the GPUs of a trace did in the profiled steps.

    Raises:
        TraceFormatError: the profiled steps are empty or contain no GPU work.
    """
    return _Analysis(trace).report()


def _seconds(microseconds: float) -> float:
    return round(float(microseconds) * 1e-6, _DIGITS)


class _Analysis:
    """One trace, its window, and the GPU work inside the window."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._steps = _profiled_steps(trace)
        self._window = _window(trace, self._steps)
        starts, ends = clip(trace.work.starts, trace.work.ends, self._window)
        inside = (trace.work.ends > self._window[0]) & (trace.work.starts < self._window[1])
        if not inside.any():
            raise TraceFormatError(
                f"{trace.source}: no GPU work in its profiled steps. Were their kernels recorded in another step?"
            )
        self._outside = int((~inside).sum())
        self._work = trace.work.where(inside)
        self._microseconds = (ends - starts)[inside]
        self._spans = starts[inside], ends[inside]
        # per piece of work: the call that launched it, one for all kernels of a CUDA graph, or ABSENT
        self._launches = first_match(trace.calls.correlations, self._work.correlations)
        # and the name of the operator; the index ABSENT, -1, selects the appended values
        operators = first_match(trace.operators.operators, self._work.operators)
        self._operators = np.append(trace.operators.names, ABSENT)[operators]
        self._names = (*trace.names, "")

    def report(self) -> TraceReport:
        trace = self._trace
        phases = work_phases(trace, self._launches)
        host = host_layers(trace, self._window)
        order = list(KernelClass)
        classes = np.array([order.index(kernel_class(name)) for name in trace.names])[self._work.names]
        return TraceReport(
            source=trace.source,
            window_seconds=_seconds(self._window[1] - self._window[0]),
            steps=tuple(trace.names[name] for name in self._steps.names),
            devices=tuple(self._device_use(*device) for device in group_indices(self._work.places)),
            launches=self._launch_calls(),
            classes=self._times(classes, KernelClass),
            phases=None if phases is None else self._times(phases, WorkPhase),
            kernels=self._kernels(),
            host=None if host is None else {layer: _seconds(time) for layer, time in host.items()},
            notes=tuple(self._notes()),
        )

    def _device_use(self, device: int, index: Numbers) -> DeviceUse:
        work = self._work.where(index)
        kernels = index[work.kinds == KERNEL]
        gaps = find_gaps(work, self._launches[index], self._trace.calls, self._window)
        return DeviceUse(
            device=device,
            window_seconds=_seconds(self._window[1] - self._window[0]),
            streams=len(np.unique(work.streams)),
            kernels=len(kernels),
            copies=len(index) - len(kernels),
            busy_seconds=self._busy(kernels),
            occupied_seconds=self._busy(index),
            gaps=tuple(_gap_groups(gaps)),
            largest_gaps=tuple(self._largest_gaps(gaps, index)),
        )

    def _busy(self, index: Numbers) -> float:
        starts, ends = self._spans
        return _seconds(length(union(starts[index], ends[index])))

    def _largest_gaps(self, gaps: Gaps, index: Numbers) -> Iterator[LargeGap]:
        # the index ABSENT, -1, selects the appended ABSENT
        names = np.append(self._work.names[index], ABSENT)[gaps.next_work]
        operators = np.append(self._operators[index], ABSENT)[gaps.next_work]
        for gap in np.argsort(-gaps.sizes, kind="stable")[:_LARGEST_GAPS]:
            yield LargeGap(
                start_seconds=_seconds(gaps.starts[gap] - self._window[0]),
                seconds=_seconds(gaps.sizes[gap]),
                cause=CAUSES[gaps.causes[gap]],
                next_kernel=self._names[names[gap]],
                operator=self._names[operators[gap]],
            )

    def _launch_calls(self) -> Launches:
        calls = calls_by_layer(self._trace)[HostLayer.LAUNCH]
        inside = (calls.starts >= self._window[0]) & (calls.starts < self._window[1])
        launched = self._launches != ABSENT
        delays = self._work.starts[launched] - self._trace.calls.starts[self._launches[launched]]
        return Launches(
            count=int(inside.sum()),
            seconds=_seconds((calls.ends - calls.starts)[inside].sum()),
            median_delay_seconds=_seconds(np.median(delays)) if len(delays) else None,
        )

    def _times(self, indices: Numbers, words: type[WordT]) -> dict[WordT, WorkTime]:
        """The work by category, given the index of each piece's category."""
        chosen = {word: self._microseconds[indices == index] for index, word in enumerate(words)}
        return {word: WorkTime(count=len(times), seconds=_seconds(times.sum())) for word, times in chosen.items()}

    def _kernels(self) -> tuple[KernelTime, ...]:
        names, group, counts = np.unique(self._work.names, return_inverse=True, return_counts=True)
        times = np.bincount(group, weights=self._microseconds)
        longest = np.zeros(len(names))
        np.maximum.at(longest, group, self._microseconds)
        operators = _main_operators(group, self._operators, self._microseconds, len(names))
        return tuple(
            KernelTime(
                name=self._trace.names[names[index]],
                kind=kernel_class(self._trace.names[names[index]]),
                operator=self._names[operators[index]],
                count=int(counts[index]),
                seconds=_seconds(times[index]),
                longest_seconds=_seconds(longest[index]),
            )
            for index in np.argsort(-times, kind="stable")
        )

    def _notes(self) -> Iterator[str]:
        trace = self._trace
        if not len(self._steps):
            yield "no ProfilerStep in the trace: the window is the whole trace. Call profiler.step() after each step"
        if self._outside:
            yield f"kernels, copies and fills outside the profiled steps, not counted: {self._outside:,}"
        if (unknown := int((self._launches == ABSENT).sum())) and len(trace.calls):
            yield f"kernels, copies and fills whose launching call is not in the trace: {unknown:,}"
        if trace.unusable:
            yield f"entries without a usable time, duration or name, skipped: {trace.unusable:,}"


def _profiled_steps(trace: Trace) -> Events:
    """The spans of profiled steps, sorted by start: annotations, or operators before torch 1.12."""
    for events in (trace.annotations, trace.operators):
        steps = events.where(trace.named(events, _STEP))
        if len(steps):
            break
    return steps.where(np.argsort(steps.starts, kind="stable"))


def _window(trace: Trace, steps: Events) -> tuple[float, float]:
    parts = [steps] if len(steps) else [part for part in (trace.work, trace.calls, trace.operators) if len(part)]
    start = min(float(part.starts.min()) for part in parts)
    end = max(float(part.ends.max()) for part in parts)
    if end <= start:
        raise TraceFormatError(f"{trace.source}: its profiled steps have zero duration. Record the trace again.")
    return start, end


def _main_operators(group: Numbers, operators: Numbers, microseconds: Times, groups: int) -> Numbers:
    # encode each (group, operator) pair as one integer; ABSENT is -1
    width = int(operators.max()) + 2
    pairs, index = np.unique(group * width + operators - ABSENT, return_inverse=True)
    times = np.bincount(index, weights=microseconds)
    main = np.full(groups, ABSENT)
    # ascending times: the largest is written last
    order = np.argsort(times, kind="stable")
    main[pairs[order] // width] = pairs[order] % width + ABSENT
    return main


def _gap_groups(gaps: Gaps) -> Iterator[GapGroup]:
    """Gaps by cause and size; empty groups are omitted."""
    sizes = np.digitize(gaps.sizes, SIZE_BOUNDS_US) - 1
    for index, cause in enumerate(CAUSES):
        for size, (low, high) in enumerate(pairwise(SIZE_BOUNDS_US)):
            chosen = gaps.sizes[(gaps.causes == index) & (sizes == size)]
            if len(chosen):
                yield GapGroup(
                    cause=cause,
                    from_seconds=_seconds(low),
                    below_seconds=_seconds(high) if np.isfinite(high) else None,
                    count=len(chosen),
                    seconds=_seconds(chosen.sum()),
                )
