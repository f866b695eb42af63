"""The page of `ligerprof explain FOLDER --html`: the ranks, what differs between them, and the worst rank's peak."""

from collections.abc import Iterator

from ligerprof.analyzers.explain.analysis import SnapshotAnalysis
from ligerprof.analyzers.explain.ranks import RanksReport
from ligerprof.reports.page.diff import html_changes
from ligerprof.reports.page.html import html_page, html_table, paragraph
from ligerprof.reports.page.peak import peak_parts
from ligerprof.reports.peak import largest_bytes
from ligerprof.reports.ranks import RANK_HEADS, SPREAD_HEADS, cause_lines, rank_rows, ranks_sentence, spread_rows
from ligerprof.units import in_one_unit


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
