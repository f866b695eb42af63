"""The page of `ligerprof diff --html`: what grew and shrank, and both recordings side by side."""

from collections.abc import Iterator

from ligerprof.analyzers.explain.analysis import SnapshotAnalysis
from ligerprof.analyzers.explain.diff import PeakDiff, diff_peaks
from ligerprof.reports.diff import change_cells, change_rows, difference_sentence, group_rows, signed_mib, total_rows
from ligerprof.reports.page.html import html_bars, html_page, html_pair, html_table, paragraph
from ligerprof.reports.page.payload import shortened
from ligerprof.reports.peak import largest_bytes
from ligerprof.units import in_one_unit

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
            html_table(["role", "before, MiB", "after, MiB", "change, MiB"], _role_rows(diff), change=3),
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


def _role_rows(diff: PeakDiff) -> Iterator[list[str]]:
    for row in (*change_rows(diff), *total_rows(diff)):
        yield change_cells(*row)


def _group_rows(diff: PeakDiff) -> Iterator[list[str]]:
    rows = group_rows(diff)
    for row in rows[:_MOST_ROWS]:
        yield [row.role, signed_mib(row.change_bytes), row.counts, shortened(row.who)]
    if rest := rows[_MOST_ROWS:]:
        yield [f"{len(rest)} more rows", signed_mib(sum(row.change_bytes for row in rest)), "", ""]
