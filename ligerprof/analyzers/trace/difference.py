"""Compare two traces: which parts of the step's time grew and which shrank from the first to the second."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ligerprof.analyzers.trace.gaps import GapCause
from ligerprof.analyzers.trace.host import HostLayer
from ligerprof.analyzers.trace.kernel_classes import KernelClass
from ligerprof.analyzers.trace.phases import WorkPhase
from ligerprof.analyzers.trace.report import KernelTime, TraceReport, WorkTime
from ligerprof.serialization import select

Key = TypeVar("Key")


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelChange:
    """One kernel in two traces; zeros for a trace in which it did not run.

    Attributes:
        kernel: the kernel in the second trace, or in the first if it ran only there.
    """

    kernel: KernelTime
    before_count: int
    after_count: int
    before_seconds: float
    after_seconds: float

    @property
    def difference_seconds(self) -> float:
        """Time in the second trace less time in the first."""
        return self.after_seconds - self.before_seconds

    def to_json(self) -> dict[str, Any]:
        """One entry of `kernels_by_change`."""
        return {
            **select(self, "kernel.name", "class=kernel.kind", "before_count", "after_count", "before_seconds"),
            "after_seconds": self.after_seconds,
            "difference_seconds": round(self.difference_seconds, 9),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceDifference:
    """The reports of two traces."""

    before: TraceReport
    after: TraceReport

    def kernels(self) -> tuple[KernelChange, ...]:
        """Every kernel, matched by its full name, the largest change in time first."""
        before, after = ({kernel.name: kernel for kernel in trace.kernels} for trace in (self.before, self.after))
        changes = [_change(kernel, before.get(name), after.get(name)) for name, kernel in {**before, **after}.items()]
        return tuple(sorted(changes, key=lambda change: -abs(change.difference_seconds)))

    def to_json(self, *, top: int | None = None) -> dict[str, Any]:
        """The object of `ligerprof trace A B --json`.

        Args:
            top: number of kernels to list; None lists all.
        """
        before, after = self.before, self.after
        return {
            "schema": 1,
            "kind": "trace",
            "traces": [before.to_json(top=top), after.to_json(top=top)],
            "difference": {
                "window_seconds": round(after.window_seconds - before.window_seconds, 9),
                "kernels": after.kernel_count - before.kernel_count,
                "launches": after.launches.count - before.launches.count,
                "gpu_busy_seconds": round(after.busiest.busy_seconds - before.busiest.busy_seconds, 9),
                "gpu_busy_share": after.busy_share - before.busy_share,
                "idle_seconds": _changes(before.idle_seconds, after.idle_seconds, GapCause),
                "classes": _changes(_times(before.classes), _times(after.classes), KernelClass),
                "phases": _changes(_times(before.phases), _times(after.phases), WorkPhase),
                "host": _changes(before.host, after.host, HostLayer),
                "kernels_by_change": [change.to_json() for change in self.kernels()[:top]],
            },
        }


def _change(kernel: KernelTime, before: KernelTime | None, after: KernelTime | None) -> KernelChange:
    return KernelChange(
        kernel=kernel,
        before_count=before.count if before else 0,
        after_count=after.count if after else 0,
        before_seconds=before.seconds if before else 0.0,
        after_seconds=after.seconds if after else 0.0,
    )


def _times(work: Mapping[Key, WorkTime] | None) -> dict[Key, float] | None:
    return None if work is None else {key: time.seconds for key, time in work.items()}


def _changes(
    before: Mapping[Any, float] | None, after: Mapping[Any, float] | None, words: Any
) -> dict[str, float] | None:
    """After less before, in seconds; None if a trace lacks the figures."""
    if before is None or after is None:
        return None
    return {word.value: round(after.get(word, 0.0) - before.get(word, 0.0), 9) for word in words}
