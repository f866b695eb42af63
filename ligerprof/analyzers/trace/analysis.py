"""Put a trace's figures together: busy and idle time of each GPU, kernels by class and phase, the host's time."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ligerprof.analyzers.trace.events import ABSENT, KERNEL, Events, Numbers, Trace, read_trace
from ligerprof.analyzers.trace.gaps import CAUSES, SIZE_BOUNDS_US, Gaps, find_gaps, launching_calls
from ligerprof.analyzers.trace.host import HostLayer, calls_of_layer, host_layers
from ligerprof.analyzers.trace.intervals import Times, clip, length, places_of_each, union
from ligerprof.analyzers.trace.kernel_classes import KernelClass, kernel_class
from ligerprof.analyzers.trace.phases import PHASES, WorkPhase, work_phases
from ligerprof.analyzers.trace.report import (
    DeviceUse,
    GapGroup,
    KernelTime,
    LargeGap,
    Launches,
    TraceReport,
    WorkTime,
)
from ligerprof.errors import TraceFormatError

_STEP = "ProfilerStep#"
_LARGEST_GAPS = 100

Mask = npt.NDArray[np.bool_]


def analyze_trace(path: str | Path) -> TraceReport:
    """Read a profiler trace and say what its GPUs did in the profiled steps.

    Raises:
        TraceFormatError: no trace, damaged, cut short, too large, or without GPU work.
    """
    return analyze(read_trace(path))


def analyze(trace: Trace) -> TraceReport:
    """Say what the GPUs of a trace did in the profiled steps.

    Raises:
        TraceFormatError: the profiled steps have no length, or no GPU work in them.
    """
    return _Analysis(trace).report()


def _seconds(microseconds: float) -> float:
    """Whole nanoseconds: a trace has no finer ones."""
    return round(float(microseconds) * 1e-6, 9)


class _Analysis:
    """One trace, its window, and the work within."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._steps = _profiled_steps(trace)
        self._window = _window(trace, self._steps)
        starts, ends = clip(trace.work.starts, trace.work.ends, self._window)
        inside = (trace.work.ends > self._window[0]) & (trace.work.starts < self._window[1])
        if not inside.any():
            raise TraceFormatError(
                f"{trace.source}: no GPU work within its profiled steps. Were their kernels recorded in another step?"
            )
        self._outside = int((~inside).sum())
        self._work = trace.work.where(inside)
        self._microseconds = (ends - starts)[inside]
        self._spans = starts[inside], ends[inside]
        self._launches = launching_calls(self._work, trace.calls)
        self._operators = _operator_names(trace, self._work)

    def report(self) -> TraceReport:
        trace = self._trace
        phases = work_phases(trace, self._launches)
        host = host_layers(trace, self._window)
        return TraceReport(
            source=trace.source,
            window_seconds=_seconds(self._window[1] - self._window[0]),
            steps=tuple(trace.names[name] for name in self._steps.names),
            devices=tuple(self._device_use(*device) for device in places_of_each(self._work.places)),
            launches=self._launch_calls(),
            classes=self._classes(),
            phases=None if phases is None else self._phases(phases),
            kernels=self._kernels(),
            host=None if host is None else {layer: _seconds(time) for layer, time in host.items()},
            notes=tuple(self._notes()),
        )

    def _device_use(self, device: int, index: Numbers) -> DeviceUse:
        """What one device did.

        Args:
            index: where its work is.
        """
        work = self._work.where(index)
        kernels = index[work.kinds == KERNEL]
        gaps = find_gaps(work, self._launches[index], self._trace.calls, self._window)
        return DeviceUse(
            device=device,
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
        for gap in np.argsort(-gaps.sizes, kind="stable")[:_LARGEST_GAPS]:
            work = ABSENT if gaps.next_work[gap] == ABSENT else index[gaps.next_work[gap]]
            yield LargeGap(
                start_seconds=_seconds(gaps.starts[gap] - self._window[0]),
                seconds=_seconds(gaps.sizes[gap]),
                cause=CAUSES[gaps.causes[gap]],
                next_kernel="" if work == ABSENT else self._trace.names[self._work.names[work]],
                operator="" if work == ABSENT else self._operator_name(self._operators[work]),
            )

    def _operator_name(self, name: int) -> str:
        return "" if name == ABSENT else self._trace.names[name]

    def _launch_calls(self) -> Launches:
        calls = calls_of_layer(self._trace, HostLayer.LAUNCH)
        inside = (calls.starts >= self._window[0]) & (calls.starts < self._window[1])
        launched = self._launches != ABSENT
        delays = self._work.starts[launched] - self._trace.calls.starts[self._launches[launched]]
        return Launches(
            count=int(inside.sum()),
            seconds=_seconds((calls.ends - calls.starts)[inside].sum()),
            median_delay_seconds=_seconds(np.median(delays)) if len(delays) else None,
        )

    def _classes(self) -> dict[KernelClass, WorkTime]:
        order = list(KernelClass)
        kinds = np.array([order.index(kernel_class(name)) for name in self._trace.names])[self._work.names]
        found = {kind: self._work_time(kinds == index) for index, kind in enumerate(order)}
        return {kind: work for kind, work in sorted(found.items(), key=lambda item: -item[1].seconds) if work.count}

    def _phases(self, phases: Numbers) -> dict[WorkPhase, WorkTime]:
        found = {phase: self._work_time(phases == index) for index, phase in enumerate(PHASES)}
        return {phase: work for phase, work in found.items() if work.count}

    def _work_time(self, chosen: Mask) -> WorkTime:
        return WorkTime(count=int(chosen.sum()), seconds=_seconds(self._microseconds[chosen].sum()))

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
                operator=self._operator_name(operators[index]),
                count=int(counts[index]),
                seconds=_seconds(times[index]),
                longest_seconds=_seconds(longest[index]),
            )
            for index in np.argsort(-times, kind="stable")
        )

    def _notes(self) -> Iterator[str]:
        trace = self._trace
        if not len(self._steps):
            yield "no ProfilerStep in the trace: shares are of all of it. Call the profiler's step() after each step"
        if self._outside:
            yield f"{self._outside:,} kernels, copies or fills ran outside of the profiled steps and are not counted"
        if (unknown := int((self._launches == ABSENT).sum())) and len(trace.calls):
            yield f"{unknown:,} kernels, copies or fills have no call in the trace that launched them"
        if trace.unusable:
            yield f"{trace.unusable:,} entries without a usable time, duration or name are left out"


def _profiled_steps(trace: Trace) -> Events:
    """The spans of profiled steps in order of time: annotations, among the operators before torch 1.12."""
    names = np.array([index for index, name in enumerate(trace.names) if name.startswith(_STEP)], dtype=np.int64)
    for events in (trace.annotations, trace.operators):
        steps = events.where(np.isin(events.names, names))
        if len(steps):
            return steps.where(np.argsort(steps.starts, kind="stable"))
    return trace.annotations.where(np.zeros(len(trace.annotations), dtype=np.bool_))


def _window(trace: Trace, steps: Events) -> tuple[float, float]:
    parts = [steps] if len(steps) else [part for part in (trace.work, trace.calls, trace.operators) if len(part)]
    start = min(float(part.starts.min()) for part in parts)
    end = max(float(part.ends.max()) for part in parts)
    if end <= start:
        raise TraceFormatError(f"{trace.source}: its profiled steps have no length. Record them again.")
    return start, end


def _operator_names(trace: Trace, work: Events) -> Numbers:
    """Of each piece of GPU work the name of the operator that launched it; ABSENT where the trace does not say."""
    known = np.flatnonzero(trace.operators.operators != ABSENT)
    if not len(known):
        return np.full(len(work), ABSENT)
    known = known[np.argsort(trace.operators.operators[known], kind="stable")]
    ids = trace.operators.operators[known]
    places = np.minimum(np.searchsorted(ids, work.operators), len(known) - 1)
    found = (ids[places] == work.operators) & (work.operators != ABSENT)
    return np.where(found, trace.operators.names[known[places]], ABSENT)


def _main_operators(group: Numbers, operators: Numbers, microseconds: Times, groups: int) -> Numbers:
    """Of each group the operator with the most time."""
    # one number for each pair; ABSENT is -1
    width = int(operators.max()) + 2
    pairs, index = np.unique(group * width + operators - ABSENT, return_inverse=True)
    times = np.bincount(index, weights=microseconds)
    main = np.full(groups, ABSENT)
    # the largest time is written last
    order = np.argsort(times, kind="stable")
    main[pairs[order] // width] = pairs[order] % width + ABSENT
    return main


def _gap_groups(gaps: Gaps) -> Iterator[GapGroup]:
    """Gaps by cause and size; groups without any are left out."""
    bounds = SIZE_BOUNDS_US
    sizes = np.digitize(gaps.sizes, bounds) - 1
    for cause in CAUSES:
        for size in range(len(bounds) - 1):
            chosen = gaps.of_cause(cause) & (sizes == size)
            if not chosen.any():
                continue
            below = bounds[size + 1]
            yield GapGroup(
                cause=cause,
                from_seconds=_seconds(bounds[size]),
                below_seconds=_seconds(below) if np.isfinite(below) else None,
                count=int(chosen.sum()),
                seconds=_seconds(gaps.sizes[chosen].sum()),
            )
