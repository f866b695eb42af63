"""The pages of `ligerprof explain --html` and `diff --html`: a peak, two peaks side by side, and the ranks of a run."""

from collections.abc import Iterable, Iterator, Sequence

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


@in_one_unit(lambda analysis, **_: largest_bytes(analysis.peak))
def render_peak_page(analysis: SnapshotAnalysis, *, source: str) -> str:
    """The whole page as HTML text; `source` is the file's name, for the title."""
    is_failure = analysis.peak.out_of_memory is not None
    title = f"{source}: out of memory" if is_failure else f"{source}: memory at the peak"
    return html_page(title, [*peak_parts(analysis, notes=analysis.peak.notes)], [analysis])


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
def render_ranks_page(report: RanksReport, worst: SnapshotAnalysis, *, source: str) -> str:
    """The whole page as HTML text.

    Args:
        worst: the analysis of the worst rank.
        source: the folder's name, for the title.
    """
    return html_page(f"{source}: memory by rank", _parts(report, worst), [worst])


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
