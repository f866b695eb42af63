"""Render `ligerprof trace`: the step's time on the GPU and on the host, for one trace or two."""

from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table

from ligerprof.analyzers.trace.analysis import DeviceUse, TraceDifference, TraceReport, WorkTime
from ligerprof.analyzers.trace.times import GapCause, HostLayer, KernelClass, WorkPhase, short_name
from ligerprof.reports.terminal import NO_FIGURE, bold, cut, listing_table, percent_share, stacked
from ligerprof.words import WordT

_NAME_WIDTH, _OPERATOR_WIDTH = 46, 20
_PAIR = ("first", "second", "change")


def render_trace(report: TraceReport, *, top: int) -> RenderableType:
    """Lay out one trace, at most 100 columns wide, with `top` rows in the table of kernels."""
    parts: list[RenderableType] = [bold(heading(report)), verdict(report), ""]
    for device in report.devices:
        parts += [_device_table(device), _gap_table(device)]
    classes = sorted(report.classes.items(), key=lambda item: -item[1].seconds)
    parts.append(_work_table("kernels by class", classes, "contents"))
    if report.phases is not None:
        parts.append(_work_table("kernels by phase", report.phases.items()))
    if report.host is not None:
        parts.append(_host_table(report, report.host))
    parts.append(_kernel_table(report, top))
    return stacked(*parts, *(f"note: {note}" for note in report.notes))


def render_trace_difference(difference: TraceDifference, *, top: int) -> RenderableType:
    """Lay out two traces side by side, at most 100 columns wide, with `top` rows in the table of kernels."""
    before, after = difference.before, difference.after
    parts: list[RenderableType] = []
    for name, report in (("first", before), ("second", after)):
        parts += [bold(f"{name}: {heading(report)}"), verdict(report)]
    parts += ["", _step_pair(before, after), _work_pair("kernels by class, ms", before.classes, after.classes)]
    if before.phases is not None and after.phases is not None:
        parts.append(_work_pair("kernels by phase, ms", before.phases, after.phases))
    if before.host is not None and after.host is not None:
        parts.append(_host_pair(before.host, after.host))
    parts.append(_changes_table(difference, top))
    notes = [f"{name} trace: {note}" for name, r in (("first", before), ("second", after)) for note in r.notes]
    return stacked(*parts, *(f"note: {note}" for note in notes))


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
        f"{device.kernels:,} kernels kept GPU {device.device} busy for {percent_share(device.busy_seconds, window)}"
        f" of the time ({_ms(device.busy_seconds)} ms)"
    )
    if idle_seconds <= 0:
        return f"{text}; it was never idle."
    cause = max(GapCause, key=device.gap_seconds)
    return (
        f"{text}. It was idle for {percent_share(idle_seconds, window)} ({_ms(idle_seconds)} ms)."
        f" Largest cause: {cause.meaning} ({percent_share(device.gap_seconds(cause), idle_seconds)} of idle time)."
    )


def _device_table(device: DeviceUse) -> Table:
    window_seconds = device.window_seconds
    copies_seconds = device.occupied_seconds - device.busy_seconds
    uses = [("kernels", device.busy_seconds, device.kernels), ("copies and fills only", copies_seconds, device.copies)]
    for cause in GapCause:
        if count := sum(gap.count for gap in device.gaps if gap.cause is cause):
            uses.append((f"idle: {cause.meaning}", device.gap_seconds(cause), count))
    rows = [
        (name, _ms(seconds), percent_share(seconds, window_seconds), _count(count)) for name, seconds, count in uses
    ]
    total = ("total", _ms(window_seconds), percent_share(window_seconds, window_seconds), "")
    streams = "1 stream" if device.streams == 1 else f"{device.streams} streams"
    return _table(f"GPU {device.device}, {streams}", ("ms", "share", "count"), [*rows, (), total])


def _gap_table(device: DeviceUse) -> Table:
    """Gaps by size, with one column per cause that occurs."""
    causes = [cause for cause in GapCause if device.gap_seconds(cause)]
    rows = []
    by_size = sorted(device.gaps, key=lambda gap: gap.from_seconds)
    for _, same_size in groupby(by_size, key=lambda gap: gap.from_seconds):
        gaps = list(same_size)
        low, high = gaps[0].from_seconds, gaps[0].below_seconds
        size = f"{_us(low)} to {_us(high)}" if high is not None else f"{_us(low)} up"
        times = [sum(gap.seconds for gap in gaps if gap.cause is cause) for cause in causes]
        rows.append((size, _count(sum(gap.count for gap in gaps)), _ms(sum(times)), *map(_ms, times)))
    return _table("gap, µs", ("count", "ms", *(f"{cause.replace('_', ' ')}, ms" for cause in causes)), rows)


def _work_table(title: str, work: Iterable[tuple[KernelClass | WorkPhase, WorkTime]], *last: str) -> Table:
    times = [(kind, time) for kind, time in work if time.count]
    total_seconds = sum(time.seconds for _, time in times)
    rows = []
    for kind, time in times:
        cells = (kind, _ms(time.seconds), percent_share(time.seconds, total_seconds), *_count_and_mean(time))
        rows.append((*cells, kind.meaning) if isinstance(kind, KernelClass) else cells)
    return _table(title, ("ms", "share", "count", "mean, µs"), rows, *last)


def _host_table(report: TraceReport, host: Mapping[HostLayer, float]) -> Table:
    count = report.kernel_count
    rows = []
    for layer, seconds in host.items():
        per_kernel = _us(seconds / count) if count else NO_FIGURE
        rows.append((layer, _ms(seconds), percent_share(seconds, report.window_seconds), per_kernel, layer.meaning))
    return _table("host", ("ms", "share", "µs per kernel"), rows, "contents")


def _kernel_table(report: TraceReport, top: int) -> Table:
    rows: list[tuple[str, ...]] = [
        (
            cut(short_name(kernel.name), _NAME_WIDTH),
            _ms(kernel.seconds),
            *_count_and_mean(kernel),
            cut(kernel.operator, _OPERATOR_WIDTH),
        )
        for kernel in report.kernels[:top]
    ]
    if rest := report.kernels[top:]:
        count = _count(sum(kernel.count for kernel in rest))
        rows += [(), (f"{len(rest)} more", _ms(sum(kernel.seconds for kernel in rest)), count, "", "")]
    return _table("kernel", ("ms", "count", "mean, µs"), rows, "operator")


def _step_pair(before: TraceReport, after: TraceReport) -> Table:
    first, second = before.busiest, after.busiest
    rows = [
        ("time, ms", *_pair(_ms, before.window_seconds, after.window_seconds)),
        ("kernels", *_pair(_count, before.kernel_count, after.kernel_count)),
        ("kernels, ms", *_pair(_ms, first.busy_seconds, second.busy_seconds)),
        ("busy, %", *_pair(lambda share: f"{100 * share:.1f}", first.busy_share, second.busy_share)),
    ]
    for cause in GapCause:
        seconds = (first.gap_seconds(cause), second.gap_seconds(cause))
        if any(seconds):
            rows.append((f"idle: {cause.meaning}, ms", *_pair(_ms, *seconds)))
    return _table("step", _PAIR, rows)


def _work_pair(title: str, before: Mapping[WordT, WorkTime], after: Mapping[WordT, WorkTime]) -> Table:
    rows = [
        (kind, *_pair(_ms, first.seconds, after[kind].seconds), _count(first.count), _count(after[kind].count))
        for kind, first in before.items()
        if first.count or after[kind].count
    ]
    return _table(title, (*_PAIR, "first, count", "second, count"), rows)


def _host_pair(before: Mapping[HostLayer, float], after: Mapping[HostLayer, float]) -> Table:
    rows = [(layer, *_pair(_ms, before[layer], after[layer]), layer.meaning) for layer in HostLayer]
    return _table("host, ms", _PAIR, rows, "contents")


def _changes_table(difference: TraceDifference, top: int) -> Table:
    changes = difference.kernels()
    rows: list[tuple[str, ...]] = [
        (
            cut(short_name(change.kernel.name), _NAME_WIDTH - 8),
            *_pair(_ms, change.before.seconds, change.after.seconds),
            f"{_count(change.before.count)} > {_count(change.after.count)}",
            cut(change.kernel.operator, _OPERATOR_WIDTH - 4),
        )
        for change in changes[:top]
    ]
    if rest := changes[top:]:
        seconds = (sum(change.before.seconds for change in rest), sum(change.after.seconds for change in rest))
        rows += [(), (f"{len(rest)} more", *_pair(_ms, *seconds), "", "")]
    return _table("kernel, ms", (*_PAIR, "count"), rows, "operator")


def _table(heading: str, figures: tuple[str, ...], rows: Iterable[tuple[str, ...]], *last: str) -> Table:
    return listing_table(heading, *figures, *last, right=figures, folded=(heading, *figures, *last), rows=rows)


def _pair(write: Callable[[float], str], before: float, after: float) -> tuple[str, str, str]:
    """The cells of two figures and their difference."""
    change = write(after - before)
    return write(before), write(after), f"+{change}" if after > before else change


def _count_and_mean(time: WorkTime) -> tuple[str, str]:
    return _count(time.count), _us(time.mean_seconds)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.2f}"


def _us(seconds: float) -> str:
    microseconds = 1e6 * seconds
    return f"{microseconds:,.1f}" if microseconds % 1 else f"{microseconds:,.0f}"


def _count(number: float) -> str:
    return f"{number:,.0f}"
