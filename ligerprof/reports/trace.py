"""Render `ligerprof trace`: the step's time on the GPU and on the host, for one trace or two."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ligerprof.analyzers.trace.difference import TraceDifference
from ligerprof.analyzers.trace.gaps import GapCause
from ligerprof.analyzers.trace.host import LAYER_MEANINGS
from ligerprof.analyzers.trace.kernel_classes import CLASS_MEANINGS, KernelClass, short_name
from ligerprof.analyzers.trace.phases import WorkPhase
from ligerprof.analyzers.trace.report import DeviceUse, KernelTime, TraceReport, WorkTime

GAP_MEANINGS: dict[GapCause, str] = {
    GapCause.HOST_LATE: "idle: host launched late",
    GapCause.LAUNCHING: "idle: launch in progress",
    GapCause.QUEUED: "idle: between queued kernels",
    GapCause.UNKNOWN: "idle: launch not in the trace",
    GapCause.END: "idle: after the last kernel",
}
_NAME_WIDTH, _OPERATOR_WIDTH = 46, 20
_UNKNOWN = "n/a"


def render_trace(report: TraceReport, *, top: int) -> RenderableType:
    """Lay out one trace, at most 100 columns wide.

    Args:
        top: number of rows in the table of kernels.
    """
    parts: list[RenderableType] = [Text(heading(report), style="bold"), Text(verdict(report)), Text("")]
    for device in report.devices:
        parts += [_device_table(device, report.window_seconds), _gap_table(device)]
    parts.append(_work_table("kernels by class", report.classes, CLASS_MEANINGS))
    if report.phases is not None:
        parts.append(_work_table("kernels by phase", report.phases, {}))
    if report.host is not None:
        parts.append(_host_table(report))
    parts.append(_kernel_table(report.kernels, top))
    return Group(*parts, *(Text(f"note: {note}") for note in report.notes))


def render_trace_difference(difference: TraceDifference, *, top: int) -> RenderableType:
    """Lay out two traces side by side, at most 100 columns wide.

    Args:
        top: number of rows in the table of kernels.
    """
    traces = (difference.before, difference.after)
    parts: list[RenderableType] = []
    for name, report in zip(("first", "second"), traces, strict=True):
        parts += [Text(f"{name}: {heading(report)}", style="bold"), Text(verdict(report))]
    parts += [Text(""), _step_pair(traces), _pair_of(KernelClass, "kernels by class, ms", [r.classes for r in traces])]
    phases = [report.phases for report in traces if report.phases is not None]
    if len(phases) == len(traces):
        parts.append(_pair_of(WorkPhase, "kernels by phase, ms", phases))
    if (host := _host_pair(traces)) is not None:
        parts.append(host)
    parts.append(_changes_table(difference, top))
    notes = [f"{name} trace: {note}" for name, r in zip(("first", "second"), traces, strict=True) for note in r.notes]
    return Group(*parts, *(Text(f"note: {note}") for note in notes))


def heading(report: TraceReport) -> str:
    """The file, the profiled steps and their duration."""
    name = Path(report.source).name
    if not report.steps:
        return f"{name}: the whole trace, {_ms(report.window_seconds)} ms"
    steps = report.steps[0] if len(report.steps) == 1 else f"{report.steps[0]} to {report.steps[-1]}"
    return f"{name}: {steps}, {_ms(report.window_seconds)} ms"


def verdict(report: TraceReport) -> str:
    """Summarize the busiest GPU: busy and idle time, and the largest cause of idle time."""
    device, window = report.busiest, report.window_seconds
    idle_seconds = window - device.occupied_seconds
    text = (
        f"{device.kernels:,} kernels kept GPU {device.device} busy for {_share(device.busy_seconds, window)}"
        f" of the time ({_ms(device.busy_seconds)} ms)"
    )
    if idle_seconds <= 0:
        return f"{text}; it was never idle."
    cause = max(GapCause, key=device.gap_seconds)
    meaning = GAP_MEANINGS[cause].removeprefix("idle: ")
    return (
        f"{text}. It was idle for {_share(idle_seconds, window)} ({_ms(idle_seconds)} ms)."
        f" Largest cause: {meaning} ({_share(device.gap_seconds(cause), idle_seconds)} of idle time)."
    )


def _device_table(device: DeviceUse, window_seconds: float) -> Table:
    streams = "1 stream" if device.streams == 1 else f"{device.streams} streams"
    table = _table(f"GPU {device.device}, {streams}", ("ms", "share", "count"))
    copies_seconds = device.occupied_seconds - device.busy_seconds
    rows = [("kernels", device.busy_seconds, device.kernels), ("copies and fills only", copies_seconds, device.copies)]
    for cause in GapCause:
        count = sum(gap.count for gap in device.gaps if gap.cause is cause)
        if count:
            rows.append((GAP_MEANINGS[cause], device.gap_seconds(cause), count))
    for index, (name, seconds, count) in enumerate(rows, 1):
        cells = (_ms(seconds), _share(seconds, window_seconds), f"{count:,}")
        table.add_row(name, *cells, end_section=index == len(rows))
    table.add_row("total", _ms(window_seconds), _share(window_seconds, window_seconds), "")
    return table


def _gap_table(device: DeviceUse) -> Table:
    """Gaps by size, with one column per cause that occurs."""
    causes = [cause for cause in GapCause if device.gap_seconds(cause)]
    table = _table("gap, µs", ("count", "ms", *(f"{cause.value.replace('_', ' ')}, ms" for cause in causes)))
    by_size = sorted(device.gaps, key=lambda gap: gap.from_seconds)
    for _, same_size in groupby(by_size, key=lambda gap: gap.from_seconds):
        gaps = list(same_size)
        below = gaps[0].below_seconds
        size = (
            f"{_us(gaps[0].from_seconds)} to {_us(below)}" if below is not None else f"{_us(gaps[0].from_seconds)} up"
        )
        times = [sum(gap.seconds for gap in gaps if gap.cause is cause) for cause in causes]
        table.add_row(size, f"{sum(gap.count for gap in gaps):,}", _ms(sum(times)), *map(_ms, times))
    return table


def _work_table(title: str, work: Mapping[Any, WorkTime], meanings: Mapping[Any, str]) -> Table:
    table = _table(title, ("ms", "share", "count", "mean, µs"), last="contents" if meanings else None)
    total_seconds = sum(time.seconds for time in work.values())
    for key, time in work.items():
        cells = (_ms(time.seconds), _share(time.seconds, total_seconds), f"{time.count:,}", _us(_mean(time)))
        table.add_row(key.value, *cells, *([meanings[key]] if meanings else []))
    return table


def _host_table(report: TraceReport) -> Table:
    table = _table("host", ("ms", "share", "µs per kernel"), last="contents")
    for layer, seconds in (report.host or {}).items():
        per_kernel = _us(seconds / report.kernel_count) if report.kernel_count else _UNKNOWN
        cells = (_ms(seconds), _share(seconds, report.window_seconds), per_kernel)
        table.add_row(layer.value, *cells, LAYER_MEANINGS[layer])
    return table


def _kernel_table(kernels: Sequence[KernelTime], top: int) -> Table:
    table = _table("kernel", ("ms", "count", "mean, µs"), last="operator")
    for kernel in kernels[:top]:
        cells = (_ms(kernel.seconds), f"{kernel.count:,}", _us(kernel.seconds / kernel.count))
        table.add_row(_fit(short_name(kernel.name), _NAME_WIDTH), *cells, _fit(kernel.operator, _OPERATOR_WIDTH))
    if rest := kernels[top:]:
        table.add_section()
        count = sum(kernel.count for kernel in rest)
        table.add_row(f"{len(rest)} more", _ms(sum(kernel.seconds for kernel in rest)), f"{count:,}", "", "")
    return table


def _step_pair(traces: Sequence[TraceReport]) -> Table:
    table = _table("step", ("first", "second", "change"))

    def add(name: str, write: Callable[[float], str], figure: Callable[[TraceReport], float]) -> None:
        before, after = map(figure, traces)
        table.add_row(name, write(before), write(after), _signed(write, after - before))

    add("time, ms", _ms, lambda report: report.window_seconds)
    add("kernels", _count, lambda report: report.kernel_count)
    add("kernels, ms", _ms, lambda report: report.busiest.busy_seconds)
    add("busy, %", lambda share: f"{100 * share:.1f}", lambda report: report.busy_share)
    for cause in GapCause:
        if any(report.idle_seconds[cause] for report in traces):
            add(f"{GAP_MEANINGS[cause]}, ms", _ms, lambda report, cause=cause: report.idle_seconds[cause])  # type: ignore[misc]
    return table


def _pair_of(words: Iterable[Any], title: str, work: Sequence[Mapping[Any, WorkTime]]) -> Table:
    table = _table(title, ("first", "second", "change", "first, count", "second, count"))
    for word in words:
        before, after = (times.get(word, WorkTime(count=0, seconds=0.0)) for times in work)
        if before.count or after.count:
            change = _signed(_ms, after.seconds - before.seconds)
            counts = (_count(before.count), _count(after.count))
            table.add_row(word.value, _ms(before.seconds), _ms(after.seconds), change, *counts)
    return table


def _host_pair(traces: Sequence[TraceReport]) -> Table | None:
    first, second = (report.host for report in traces)
    if first is None or second is None:
        return None
    table = _table("host, ms", ("first", "second", "change"), last="contents")
    for layer, meaning in LAYER_MEANINGS.items():
        change = _signed(_ms, second[layer] - first[layer])
        table.add_row(layer.value, _ms(first[layer]), _ms(second[layer]), change, meaning)
    return table


def _changes_table(difference: TraceDifference, top: int) -> Table:
    table = _table("kernel, ms", ("first", "second", "change", "count"), last="operator")
    changes = difference.kernels()
    for change in changes[:top]:
        times = (_ms(change.before_seconds), _ms(change.after_seconds), _signed(_ms, change.difference_seconds))
        counts = f"{change.before_count:,} > {change.after_count:,}"
        name, operator = short_name(change.kernel.name), change.kernel.operator
        table.add_row(_fit(name, _NAME_WIDTH - 8), *times, counts, _fit(operator, _OPERATOR_WIDTH - 4))
    if rest := changes[top:]:
        table.add_section()
        before, after = (sum(times) for times in zip(*((c.before_seconds, c.after_seconds) for c in rest), strict=True))
        table.add_row(f"{len(rest)} more", _ms(before), _ms(after), _signed(_ms, after - before), "", "")
    return table


def _table(heading: str, figures: Sequence[str], *, last: str | None = None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(heading, no_wrap=True)
    for figure in figures:
        table.add_column(figure, justify="right", no_wrap=True)
    if last is not None:
        table.add_column(last, no_wrap=True)
    return table


def _mean(time: WorkTime) -> float:
    return time.seconds / time.count


def _fit(text: str, width: int) -> Text:
    """Shorten text to a width; a Text, so that kernel names are not read as markup."""
    return Text(text if len(text) <= width else f"{text[: width - 1]}…")


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.2f}"


def _us(seconds: float) -> str:
    microseconds = 1e6 * seconds
    return f"{microseconds:,.1f}" if microseconds % 1 else f"{microseconds:,.0f}"


def _count(number: float) -> str:
    return f"{number:,.0f}"


def _signed(write: Callable[[float], str], difference: float) -> str:
    text = write(difference)
    return f"+{text}" if difference > 0 else text


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else _UNKNOWN
