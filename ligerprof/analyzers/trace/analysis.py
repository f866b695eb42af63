"""Compute a trace's report: busy and idle time per GPU, kernels by class and phase, and host time by layer."""

import re
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from ligerprof.analyzers.trace.events import ABSENT, KERNEL, Events, Mask, Numbers, Times, Trace, first_match
from ligerprof.analyzers.trace.report import (
    DeviceUse,
    GapGroup,
    KernelTime,
    LargeGap,
    Launches,
    TraceReport,
    WorkTime,
)
from ligerprof.analyzers.trace.times import (
    CAUSES,
    SIZE_BOUNDS_US,
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
from ligerprof.words import WordT

_STEP = re.compile("^ProfilerStep#")
_LARGEST_GAPS = 100


def analyze(trace: Trace) -> TraceReport:
    """Report what the GPUs of a trace did in the profiled steps.

    Raises:
        TraceFormatError: the profiled steps are empty or contain no GPU work.
    """
    return _Analysis(trace).report()


def _seconds(microseconds: float) -> float:
    """Seconds, rounded to nanoseconds, the resolution of a trace."""
    return round(float(microseconds) * 1e-6, 9)


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
        return {word: self._work_time(indices == index) for index, word in enumerate(words)}

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
