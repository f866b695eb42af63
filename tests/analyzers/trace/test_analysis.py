"""Compare the analysis with a slow oracle that steps through the trace microsecond by microsecond."""

import json
import lzma
from decimal import Decimal
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ligerprof.analyzers.trace.analysis import DeviceUse, TraceReport, analyze
from ligerprof.analyzers.trace.events import collect, read_trace
from ligerprof.analyzers.trace.times import GapCause, HostLayer, KernelClass, WorkPhase
from ligerprof.errors import TraceFormatError
from tests.analyzers.trace.entries import (
    BACKWARD,
    MAIN,
    RECORDING,
    Entry,
    call,
    copy,
    kernel,
    operator,
    span,
    step,
)

NANOSECOND = 1e-9


def report_of(*entries: Entry) -> TraceReport:
    return analyze(collect("trace", entries))


@cache
def recorded() -> TraceReport:
    return analyze(read_trace(RECORDING))


@cache
def recorded_entries() -> list[dict[str, Any]]:
    # Decimal keeps every digit of a time
    values = json.loads(lzma.decompress(RECORDING.read_bytes()), parse_float=Decimal)
    entries: list[dict[str, Any]] = values["traceEvents"]
    return entries


def slow_union(spans: list[tuple[Decimal, Decimal]]) -> Decimal:
    """Sweep over the borders: a moment counts once, however many spans contain it."""
    borders = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    total, running, since = Decimal(0), 0, Decimal(0)
    for moment, change in borders:
        if running:
            total += moment - since
        running, since = running + change, moment
    return total


def recorded_spans(*categories: str) -> list[tuple[Decimal, Decimal]]:
    (window,) = (
        entry
        for entry in recorded_entries()
        if entry.get("cat") == "user_annotation" and entry["name"].startswith("ProfilerStep")
    )
    begin, end = window["ts"], window["ts"] + window["dur"]
    spans = [
        (max(entry["ts"], begin), min(entry["ts"] + entry["dur"], end))
        for entry in recorded_entries()
        if entry.get("cat") in categories
    ]
    return [(start, stop) for start, stop in spans if start < stop]


def test_busy_time_of_a_recording_is_the_union_of_its_kernels() -> None:
    kernels = recorded_spans("kernel")
    device = recorded().devices[0]

    assert device.kernels == len(kernels) == 2558
    assert device.busy_seconds == pytest.approx(float(slow_union(kernels)) * 1e-6, abs=len(kernels) * NANOSECOND)
    assert device.busy_seconds / recorded().window_seconds == pytest.approx(0.655, abs=0.0005)
    everything = slow_union(recorded_spans("kernel", "gpu_memcpy", "gpu_memset"))
    assert device.occupied_seconds == pytest.approx(float(everything) * 1e-6, abs=len(kernels) * NANOSECOND)


def test_the_parts_of_a_recording_add_up() -> None:
    report = recorded()
    device = report.devices[0]
    idle_seconds = sum(gap.seconds for gap in device.gaps)
    assert device.occupied_seconds + idle_seconds == pytest.approx(report.window_seconds, abs=5e-8)
    assert sum((report.host or {}).values()) == pytest.approx(report.window_seconds, abs=1e-8)
    work_seconds = sum(work.seconds for work in report.classes.values())
    assert sum(work.seconds for work in (report.phases or {}).values()) == pytest.approx(work_seconds, abs=1e-7)
    assert sum(kernel.seconds for kernel in report.kernels) == pytest.approx(work_seconds, abs=1e-7)
    # one stream: the sum of durations equals the length of their union
    assert work_seconds == pytest.approx(device.occupied_seconds, abs=1e-6)
    assert sum(kernel.count for kernel in report.kernels) == device.kernels + device.copies


def test_a_recording_waits_for_the_host() -> None:
    report = recorded()
    device = report.devices[0]

    late = device.gap_seconds(GapCause.HOST_LATE)
    assert late > 0.9 * (report.window_seconds - device.occupied_seconds)
    launches = {
        entry["args"]["correlation"]: entry
        for entry in recorded_entries()
        if entry.get("cat") in ("cuda_runtime", "cuda_driver")
    }
    work = sorted(
        (entry for entry in recorded_entries() if entry.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")),
        key=lambda entry: entry["ts"],
    )
    expected = Decimal(0)
    # one stream: nothing overlaps, so the previous work is the last to end
    for before, after in pairwise(work):
        idle_since = before["ts"] + before["dur"]
        if after["ts"] > idle_since and launches[after["args"]["correlation"]]["ts"] >= idle_since:
            expected += after["ts"] - idle_since
    # the first kernel's gap begins with the step, before any launch
    assert late == pytest.approx(float(expected) * 1e-6, abs=1e-6 + device.largest_gaps[1].seconds)


def test_checkpointing_runs_the_forward_pass_of_the_layers_twice() -> None:
    phases = recorded().phases
    assert phases is not None
    assert 0.8 < phases[WorkPhase.RECOMPUTATION].count / phases[WorkPhase.FORWARD].count < 1
    assert phases[WorkPhase.OPTIMIZER].count == 62
    assert phases[WorkPhase.UNKNOWN].count == 0


# times on a grid of one microsecond, so that the oracle can step through them
SPANS = st.tuples(st.integers(0, 60), st.integers(0, 12))
GPU_WORK = st.lists(st.tuples(SPANS, st.integers(0, 2), st.booleans(), st.integers(-1, 8)), min_size=1, max_size=12)
CALLS = st.lists(SPANS, max_size=8)


def moments(start: int, duration: int) -> set[int]:
    return set(range(start, start + duration))


@given(work=GPU_WORK, calls=CALLS, window=st.tuples(st.integers(0, 40), st.integers(1, 40)))
def test_every_microsecond_is_busy_or_in_one_gap_with_its_cause(
    work: list[tuple[tuple[int, int], int, bool, int]], calls: list[tuple[int, int]], window: tuple[int, int]
) -> None:
    entries = [step(*window)]
    entries += [call(*at, correlation=index) for index, at in enumerate(calls)]
    for (start, duration), stream, is_copy, launched_by in work:
        entries.append((copy if is_copy else kernel)(start, duration, stream=stream, correlation=launched_by))
    ticks = moments(*window)
    inside = [item for item in work if item[0][0] + item[0][1] > window[0] and item[0][0] < sum(window)]
    if not inside:
        with pytest.raises(TraceFormatError, match="no GPU work in its profiled steps"):
            report_of(*entries)
        return

    (device,) = report_of(*entries).devices

    busy = {tick for at, _, is_copy, _ in inside if not is_copy for tick in moments(*at)} & ticks
    occupied = {tick for at, *_ in inside for tick in moments(*at)} & ticks
    assert device.busy_seconds == pytest.approx(len(busy) * 1e-6)
    assert device.occupied_seconds == pytest.approx(len(occupied) * 1e-6)
    assert device.streams == len({stream for _, stream, _, _ in inside})
    assert gap_times(device) == pytest.approx(slow_gaps(inside, calls, ticks - occupied, sum(window)))


def gap_times(device: DeviceUse) -> dict[GapCause, float]:
    return {cause: device.gap_seconds(cause) * 1e6 for cause in GapCause}


def slow_gaps(
    work: list[tuple[tuple[int, int], int, bool, int]], calls: list[tuple[int, int]], idle: set[int], end: int
) -> dict[GapCause, float]:
    """Each idle microsecond belongs to the work that starts next; on a tie, to the first in the file."""
    times = dict.fromkeys(GapCause, 0.0)
    for tick in idle:
        later = [item for item in work if tick < item[0][0] < end]
        # work of zero length inside an idle span ends one gap and begins another
        begin = max([tick_before for tick_before in range(-1, tick) if tick_before not in idle] + [-1]) + 1
        begin = max([begin, *(at[0] for at, *_ in work if begin <= at[0] <= tick)])
        if not later:
            times[GapCause.END] += 1
            continue
        launched_by = min(later, key=lambda item: item[0][0])[3]
        if not 0 <= launched_by < len(calls):
            times[GapCause.UNKNOWN] += 1
            continue
        start, duration = calls[launched_by]
        if start >= begin:
            times[GapCause.HOST_LATE] += 1
        elif start + duration > begin:
            times[GapCause.LAUNCHING] += 1
        else:
            times[GapCause.QUEUED] += 1
    return times


HOST_ENTRIES = st.lists(
    st.tuples(
        SPANS,
        st.sampled_from([MAIN, BACKWARD, 12]),
        st.sampled_from(
            [
                ("cuda_runtime", "cudaLaunchKernel", HostLayer.LAUNCH),
                ("cuda_driver", "cuLaunchKernelEx", HostLayer.LAUNCH),
                ("cuda_runtime", "cudaMemsetAsync", HostLayer.LAUNCH),
                ("cuda_runtime", "cudaStreamSynchronize", HostLayer.WAIT),
                ("cuda_runtime", "cudaStreamIsCapturing", HostLayer.CUDA_CALLS),
                ("cpu_op", "aten::mm", HostLayer.DISPATCH),
                ("cpu_op", "autograd::engine::evaluate_function: MmBackward0", HostLayer.AUTOGRAD),
                ("cpu_op", "MmBackward0", HostLayer.AUTOGRAD),
                ("user_annotation", "my own span", None),
            ]
        ),
    ),
    max_size=12,
)


@given(entries=HOST_ENTRIES)
def test_every_microsecond_of_the_host_is_in_its_innermost_layer(
    entries: list[tuple[tuple[int, int], int, tuple[str, str, HostLayer | None]]],
) -> None:
    spans = [
        span(category, name, *at, tid=thread, **({"Sequence number": 3, "Fwd thread id": 1} if name[0] == "M" else {}))
        for at, thread, (category, name, _) in entries
    ]
    report = report_of(step(0, 80), kernel(0, 1), *spans)

    launching = {thread for _, thread, (*_, layer) in entries if layer is HostLayer.LAUNCH}
    if not launching:
        assert report.host is None
        return
    times = dict.fromkeys(HostLayer, 0)
    for tick in range(80):
        running = {layer for at, thread, (*_, layer) in entries if thread in launching and tick in moments(*at)}
        times[next((layer for layer in HostLayer if layer in running), HostLayer.PYTHON)] += 1
    assert report.host == pytest.approx({layer: time * 1e-6 for layer, time in times.items()}, abs=NANOSECOND)


def test_two_devices_are_reported_separately() -> None:
    report = report_of(
        step(0, 100), kernel(0, 30, device=0), kernel(10, 50, device=1), kernel(20, 50, device=1, stream=8)
    )

    assert [(device.device, device.streams, device.busy_seconds) for device in report.devices] == [
        (0, 1, 30e-6),
        (1, 2, 60e-6),
    ]
    assert report.busiest.device == 1
    assert report.to_json()["gpu_busy_share"] == pytest.approx(0.6)


def test_parts_of_a_step_come_from_what_the_host_ran() -> None:
    report = report_of(
        step(0, 100),
        call(1, 1, 1),
        operator(10, 20, "autograd::engine::evaluate_function: MulBackward0", tid=BACKWARD),
        operator(11, 3, "aten::silu", tid=BACKWARD, **{"Sequence number": 5, "Fwd thread id": 0}),
        call(12, 1, 2, tid=BACKWARD),
        call(20, 1, 3, tid=BACKWARD),
        # concurrent on the main thread: not within the other thread's node
        call(21, 1, 4),
        span("user_annotation", "Optimizer.step#AdamW.step", 40, 10),
        call(41, 1, 5),
        *(kernel(50 + index, 1, correlation=index) for index in range(1, 7)),
    )

    assert report.phases is not None
    assert {phase: work.count for phase, work in report.phases.items()} == {
        WorkPhase.FORWARD: 2,
        WorkPhase.BACKWARD: 1,
        WorkPhase.RECOMPUTATION: 1,
        WorkPhase.OPTIMIZER: 1,
        WorkPhase.UNKNOWN: 1,
    }


def test_without_spans_of_autograd_there_are_no_parts() -> None:
    assert report_of(step(0, 10), call(1, 1, 1), kernel(3, 1, correlation=1)).phases is None


def test_a_gpu_annotation_is_neither_a_step_nor_work() -> None:
    annotation = span("gpu_user_annotation", "ProfilerStep#1", 50, 10, device=0)
    report = report_of(step(0, 100), annotation, kernel(50, 10))

    assert (report.window_seconds, report.steps) == (100e-6, ("ProfilerStep#1",))
    assert report.kernel_count == 1


def test_steps_of_old_traces_are_operators() -> None:
    report = report_of(
        span("Operator", "ProfilerStep#4", 10, 20), span("Kernel", "gemm", 15, 5, device=0, stream=1), kernel(50, 1)
    )

    assert (report.steps, report.window_seconds, report.kernel_count) == (("ProfilerStep#4",), 20e-6, 1)
    assert report.notes == ("kernels, copies and fills outside the profiled steps, not counted: 1",)


def test_without_steps_the_window_is_the_whole_trace() -> None:
    report = report_of(operator(5, 10), kernel(20, 10))

    assert (report.steps, report.window_seconds) == ((), 25e-6)
    assert report.notes[0].startswith("no ProfilerStep in the trace")


def test_a_kernel_is_counted_with_the_operator_that_took_most_of_its_time() -> None:
    report = report_of(
        step(0, 100),
        operator(0, 5, "aten::add", **{"External id": 1}),
        operator(6, 5, "aten::mul", **{"External id": 2}),
        kernel(10, 5, "elementwise_kernel", **{"External id": 1}),
        kernel(20, 9, "elementwise_kernel", **{"External id": 2}),
        kernel(30, 2, "elementwise_kernel", **{"External id": 1}),
        copy(40, 2),
    )

    first, second = report.kernels
    assert (first.name, first.operator, first.count, first.longest_seconds) == (
        "elementwise_kernel",
        "aten::mul",
        3,
        9e-6,
    )
    assert (second.kind, second.operator) == (KernelClass.COPY, "")
    # the kernel that ends the longest gap has no operator; the next one has its own, not the group's main one
    assert [gap.operator for gap in report.devices[0].largest_gaps[:2]] == ["", "aten::add"]


def test_a_graph_launch_is_the_call_of_all_its_kernels() -> None:
    report = report_of(
        step(0, 100), call(1, 30, 9, "cudaGraphLaunch"), *(kernel(at, 5, correlation=9) for at in (20, 30, 40, 50))
    )

    assert gap_times(report.devices[0]) == pytest.approx(
        {
            GapCause.HOST_LATE: 20,
            GapCause.LAUNCHING: 5,
            GapCause.QUEUED: 10,
            GapCause.UNKNOWN: 0,
            GapCause.END: 45,
        }
    )
    assert report.launches.count == 1


def test_a_trace_without_gpu_work_says_what_to_record() -> None:
    with pytest.raises(TraceFormatError, match=r"contains no GPU work\. Was ProfilerActivity\.CUDA"):
        report_of(step(0, 10), operator(0, 5))


def test_steps_of_zero_duration_are_an_error() -> None:
    with pytest.raises(TraceFormatError, match="have zero duration"):
        report_of(step(5, 0), kernel(4, 5))
