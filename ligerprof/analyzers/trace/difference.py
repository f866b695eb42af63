"""Compare two traces: which parts of the step's time grew and which shrank from the first to the second."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ligerprof.analyzers.trace.report import NO_WORK, KernelTime, TraceReport, WorkTime
from ligerprof.serialization import document, select


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
