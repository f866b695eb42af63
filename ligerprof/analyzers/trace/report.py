"""The report of a trace, and what grew and shrank from one trace to another."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ligerprof.analyzers.trace.times import GapCause, HostLayer, KernelClass, WorkPhase
from ligerprof.serialization import JsonKeys, document, select, to_json


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
        streams: number of streams with work.
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
        classes: every class.
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
        host = {layer.value: self._host_json(seconds) for layer, seconds in (self.host or {}).items()}
        return document(
            "trace",
            select(self, "source", "window_seconds", "steps", "kernels=kernel_count"),
            select(self, *(f"gpu_{name}=busiest.{name}" for name in ("busy_seconds", "busy_share", "occupied_share"))),
            select(self, "devices", "launches", "classes", "phases"),
            {"top_kernels": to_json(self.kernels[:top]), "host": host or None},
            select(self, "notes"),
        )

    def _host_json(self, seconds: float) -> dict[str, Any]:
        return {"seconds": seconds, "seconds_per_kernel": seconds / self.kernel_count if self.kernel_count else None}


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
    """The difference, rounded to nanoseconds, the resolution of a trace."""
    return round(after - before, 9)


def _changes(before: Mapping[Any, Any] | None, after: Mapping[Any, Any] | None) -> dict[str, float] | None:
    """After less before, in seconds; None if a trace lacks the figures."""
    if before is None or after is None:
        return None
    return {word.value: _less(_seconds(after[word]), _seconds(before[word])) for word in before}


def _seconds(time: WorkTime | float) -> float:
    return time.seconds if isinstance(time, WorkTime) else time
