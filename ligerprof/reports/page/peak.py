"""The pages of `ligerprof explain --html` and `diff --html`: a peak, two peaks side by side, and the ranks of a run."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from ligerprof.analyzers.explain.analysis import SnapshotAnalysis
from ligerprof.analyzers.explain.failure import FailedAllocation
from ligerprof.analyzers.explain.peak import PeakDiff, diff_peaks
from ligerprof.analyzers.explain.ranks import RanksReport
from ligerprof.reports.diff import (
    RANK_HEADS,
    SPREAD_HEADS,
    cause_lines,
    change_cells,
    change_rows,
    difference_sentence,
    group_rows,
    rank_rows,
    ranks_sentence,
    signed_mib,
    spread_rows,
    total_rows,
)
from ligerprof.reports.page.html import html_bars, html_page, html_pair, html_recording, html_table, paragraph
from ligerprof.reports.page.payload import shortened
from ligerprof.reports.peak import failure_lines, growth_lines, largest_bytes, phase_lines, sentence
from ligerprof.reports.terminal import percent_share
from ligerprof.roles import MemoryBreakdown, Role
from ligerprof.units import format_like, format_mib, in_one_unit

if TYPE_CHECKING:
    from ligerprof.runs.recording.device import DeviceLedger, DeviceReport


@in_one_unit(lambda analysis, **_: largest_bytes(analysis.peak))
def render_peak_page(analysis: SnapshotAnalysis, *, source: str, devices: "Sequence[DeviceReport]" = ()) -> str:
    """The whole page as HTML text.

    Args:
        source: the file's name, for the title.
        devices: the GPUs of a recorded command over time.
    """
    is_failure = analysis.peak.out_of_memory is not None
    title = f"{source}: out of memory" if is_failure else f"{source}: memory at the peak"
    parts = [*peak_parts(analysis, notes=analysis.peak.notes), *html_devices(devices)]
    return html_page(title, parts, [analysis])


def peak_parts(analysis: SnapshotAnalysis, *, notes: Iterable[str] = ()) -> Iterator[str]:
    """What the page says and shows about the page's first recording."""
    report = analysis.peak
    oom = report.out_of_memory
    failure = [] if oom is None else failure_lines(oom)
    moments = [("peak", report.roles)] if oom is None else [("failure", oom.roles), ("peak", report.roles)]
    if oom is not None:
        yield paragraph(failure[0], "failure-line")
        yield _failure_figures(oom)
        grew = [*growth_lines(oom)]
        yield from (paragraph(line, "" if line in grew else "muted") for line in failure[1:])
    yield from (paragraph(line, "" if oom is None else "muted") for line in (sentence(report), *phase_lines(report)))
    yield from (paragraph(f"Note: {note}.") for note in notes)
    yield "<h2>Memory over the recording</h2>"
    yield html_recording()
    yield "<h2>Roles</h2>"
    yield html_table(
        ["role", *(head for name, _ in moments for head in (f"{name}, MiB", "share")), "meaning"],
        _role_rows([roles for _, roles in moments]),
    )


def _failure_figures(oom: FailedAllocation) -> str:
    """What was requested, what was free and what was missing, as large figures."""
    total = max(oom.requested_bytes, oom.missing_bytes or 0)
    figures = [("requested", oom.requested_bytes, ""), ("free, reserved but unallocated", oom.reserved_free_bytes, "")]
    if oom.missing_bytes is not None:
        bound = "missing, at most" if oom.missing_is_bound else "missing"
        figures.append((bound, oom.missing_bytes, " class=failure"))
    parts = (f"<div><dt>{name}</dt><dd{mark}>{format_like(size, total)}</dd></div>" for name, size, mark in figures)
    return f'<dl class="figures">{"".join(parts)}</dl>'


def _role_rows(moments: Sequence[MemoryBreakdown]) -> Iterator[list[str]]:
    def cells(sizes: Iterable[int]) -> list[str]:
        figures = zip(sizes, moments, strict=True)
        return [text for size, roles in figures for text in (format_mib(size), percent_share(size, roles.total_bytes))]

    for role in Role:
        if any(roles[role] for roles in moments):
            yield [role.value, *cells(roles[role] for roles in moments), role.meaning]
    yield ["total", *cells(roles.total_bytes for roles in moments), ""]


_MOST_ROWS = 200


@in_one_unit(lambda *analyses, **_: max(largest_bytes(each.peak) for each in analyses))
def render_diff_page(before: SnapshotAnalysis, after: SnapshotAnalysis, *, sources: tuple[str, str]) -> str:
    """The whole page as HTML text; `sources` are the names of the two recordings."""
    diff = diff_peaks(before.peak, after.peak)
    return html_page(
        f"{sources[0]} and {sources[1]}: what changed at the peak",
        [
            paragraph(difference_sentence(diff)),
            html_bars([(f"A: {sources[0]}", diff.before.roles), (f"B: {sources[1]}", diff.after.roles)]),
            *(paragraph(f"Note: {note}.") for note in diff.notes),
            "<h2>Changes by role</h2>",
            html_table(["role", "before, MiB", "after, MiB", "change, MiB"], _rows_of_both(diff), change=3),
            "<h2>Changes by call site</h2>",
            html_changes(diff),
            "<h2>Both recordings</h2>",
            html_pair((f"A: {sources[0]}", f"B: {sources[1]}")),
        ],
        [before, after],
    )


def html_changes(diff: PeakDiff) -> str:
    """The table of what grew and shrank, by call site."""
    return html_table(["role", "change, MiB", "blocks", "allocated by"], _group_rows(diff), change=1)


def _rows_of_both(diff: PeakDiff) -> Iterator[list[str]]:
    for row in (*change_rows(diff), *total_rows(diff)):
        yield change_cells(*row)


def _group_rows(diff: PeakDiff) -> Iterator[list[str]]:
    rows = group_rows(diff)
    for row in rows[:_MOST_ROWS]:
        yield [row.role, signed_mib(row.change_bytes), row.counts, shortened(row.who)]
    if rest := rows[_MOST_ROWS:]:
        yield [f"{len(rest)} more rows", signed_mib(sum(row.change_bytes for row in rest)), "", ""]


@in_one_unit(lambda _, worst, **__: largest_bytes(worst.peak))
def render_ranks_page(
    report: RanksReport, worst: SnapshotAnalysis, *, source: str, devices: "Sequence[DeviceReport]" = ()
) -> str:
    """The whole page as HTML text.

    Args:
        worst: the analysis of the worst rank.
        source: the folder's name, for the title.
        devices: as of `render_peak_page`.
    """
    return html_page(f"{source}: memory by rank", [*_parts(report, worst), *html_devices(devices)], [worst])


_WIDTH, _HEIGHT, _MOST_COLUMNS = 1000, 220, 200


def html_devices(devices: "Sequence[DeviceReport]") -> Iterator[str]:
    """Each GPU: what it held at its fullest, and a column for each look, of its parts from the bottom."""
    from ligerprof.reports.run import DEVICE_HEADS, device_rows, device_sentence

    for device in devices:
        yield "<h2>The whole GPU</h2>"
        yield paragraph(device_sentence(device))
        yield _device_chart(device)
        yield html_table(DEVICE_HEADS, device_rows(device.fullest))
        yield from (paragraph(f"Note: {note}.") for note in device.notes())


def _device_chart(device: "DeviceReport") -> str:
    shown = _fullest_of_each_column(device.ledgers)
    parts = list(dict.fromkeys((row.process or "", row.part) for ledger in shown for row in ledger.rows))
    # hues far from those before
    colors = {part: f"hsl({137 * number % 360} 60% 55%)" for number, part in enumerate(parts)}
    first_us, end_us = shown[0].moment.at_us, shown[-1].moment.at_us
    # the last look lasts as long as the others on average
    total_us = max((end_us - first_us) * (len(shown) + 1) / len(shown), 1)
    most_bytes = max(each.moment.used_bytes for each in shown) or 1
    columns = []
    for ledger, until_us in zip(shown, [*(each.moment.at_us for each in shown[1:]), first_us + total_us], strict=True):
        moment, top = ledger.moment, float(_HEIGHT)
        event = f"step {moment.step}" if moment.event == "step" else moment.event.replace("_", " ")
        when = f"{event} of {ledger.process}, {(moment.at_us - first_us) / 1e6:.1f} s"
        left, right = (_WIDTH * (at_us - first_us) / total_us for at_us in (moment.at_us, until_us))
        for row in ledger.rows:
            height = _HEIGHT * max(row.size_bytes, 0) / most_bytes
            top -= height
            of = f"{row.process} {row.part}" if row.process else row.part
            title = escape(f"{of}: {format_like(row.size_bytes, most_bytes)}, {when}")
            box = f'x="{left:.2f}" y="{top:.2f}" width="{right - left:.2f}" height="{height:.2f}"'
            columns.append(f'<rect {box} fill="{colors[row.process or "", row.part]}"><title>{title}</title></rect>')
    key = "".join(
        f'<span class="key"><i class="swatch" style="--fill:{color};--edge:{color}"></i>'
        f"{escape(' '.join(filter(None, part)))}</span>"
        for part, color in colors.items()
    )
    span = f"{len(shown)} looks in {(end_us - first_us) / 1e6:.1f} s, up to {format_like(most_bytes, most_bytes)}."
    view = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="memory of the whole GPU: {span}"'
    return (
        f'<div class="scroll"><svg {view} preserveAspectRatio="none" style="width:100%;height:14rem">'
        f'{"".join(columns)}</svg></div><div class="legend">{key}</div>{paragraph(span, "muted")}'
    )


def _fullest_of_each_column(ledgers: "Sequence[DeviceLedger]") -> "list[DeviceLedger]":
    """At most `_MOST_COLUMNS` looks, each the fullest in its part of the time."""
    first_us = ledgers[0].moment.at_us
    span_us = ledgers[-1].moment.at_us - first_us + 1
    found: dict[int, DeviceLedger] = {}
    for ledger in ledgers:
        column = (ledger.moment.at_us - first_us) * _MOST_COLUMNS // span_us
        if column not in found or ledger.moment.used_bytes > found[column].moment.used_bytes:
            found[column] = ledger
    return list(found.values())


def html_ranks(report: RanksReport) -> Iterator[str]:
    """Which rank is the worst, the ranks, and the roles in which they differ."""
    yield "<h2>Ranks</h2>"
    yield paragraph(ranks_sentence(report))
    yield html_table(RANK_HEADS, rank_rows(report))
    if spreads := list(spread_rows(report)):
        yield html_table(SPREAD_HEADS, spreads)
    yield from map(paragraph, cause_lines(report))


def _parts(report: RanksReport, worst: SnapshotAnalysis) -> Iterator[str]:
    yield from html_ranks(report)
    if report.difference.difference_bytes:
        yield f"<h2>From rank {report.lowest.rank} to rank {report.worst.rank}</h2>"
        yield html_changes(report.difference)
    yield from (paragraph(f"Note: {note}.") for note in report.notes)
    yield f"<h2>Rank {report.worst.rank}</h2>"
    yield from peak_parts(worst)
