"""Render `ligerprof explain` of several ranks: one sentence, the ranks, what differs between them."""

from typing import TYPE_CHECKING

from ligerprof.analyzers.explain.ranks import RankPeak, RanksReport
from ligerprof.reports.diff import changes_table
from ligerprof.reports.terminal import file_text, groups_table
from ligerprof.roles import Role
from ligerprof.units import format_bytes, format_like, format_mib

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType
    from rich.table import Table

RANK_HEADS = ("rank", "peak, MiB", "reserved, MiB", "highest in", "more than the lowest rank, MiB")
SPREAD_HEADS = ("role", "least, MiB", "rank", "most, MiB", "rank", "difference")
_FIGURE_WIDTH = 11
_RANK_WIDTH = 5
_MOST_NAMED = 3


def render_ranks(report: RanksReport, *, top: int = 10) -> "RenderableType":
    """Lay out the ranks, worst first, at most 100 columns wide, with `top` rows of block groups."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(ranks_sentence(report)), *ranks_tables(report)]
    parts += [file_text(line) for line in cause_lines(report)]
    if report.difference.difference_bytes:
        lowest, worst = report.lowest.rank, report.worst.rank
        parts += [Text(f"From rank {lowest} to rank {worst}:"), changes_table(report.difference, top)]
    parts += [file_text(f"Note: {note}.") for note in report.notes]
    parts.append(file_text(f"ligerprof explain {report.worst.source} shows the blocks of rank {report.worst.rank}."))
    return Group(*parts)


def ranks_tables(report: RanksReport) -> "list[RenderableType]":
    """The ranks, the worst first, and the roles in which they differ, if any."""
    spreads = list(spread_rows(report))
    return [_ranks_table(report), *([_spreads_table(spreads)] if spreads else [])]


def ranks_sentence(report: RanksReport) -> str:
    """Which rank is the worst, and by how much."""
    worst, lowest, count = report.worst, report.lowest, len(report.ranks)
    failed = sorted(each.rank for each in report.ranks if each.report.out_of_memory is not None)
    peak = f"{format_bytes(worst.report.peak_bytes)}{_when(worst)}"
    if failed:
        ranks = "rank" if len(failed) == 1 else "ranks"
        return f"Out of memory on {ranks} {', '.join(map(str, failed))} of {count}; rank {worst.rank} peaks at {peak}."
    if not report.difference.difference_bytes:
        return f"All {count} ranks peak at {format_bytes(worst.report.peak_bytes)}."
    sizes = (report.difference.difference_bytes, lowest.report.peak_bytes)
    more, least = (format_like(size, worst.report.peak_bytes) for size in sizes)
    return f"Rank {worst.rank} of {count} has the highest peak, {peak}: {more} more than rank {lowest.rank} ({least})."


def cause_lines(report: RanksReport) -> "Iterator[str]":
    """Why ranks hold more than the lowest one, the worst first; ranks of the same reasons together."""
    ranks_of: dict[tuple[str, ...], list[int]] = {}
    for rank, found in report.causes.items():
        ranks_of.setdefault(tuple(cause.text for cause in found), []).append(rank)
    for texts, ranks in ranks_of.items():
        if texts:
            which = f"Rank {ranks[0]}" if len(ranks) == 1 else f"Ranks {', '.join(map(str, sorted(ranks)))}"
            yield f"{which}, unlike rank {report.lowest.rank}:"
            yield from (f"- {text}" for text in texts)


def _when(each: RankPeak) -> str:
    return f" in {each.report.peak_phase.value}" if each.report.peak_phase else ""


def _ranks_table(report: RanksReport) -> "Table":
    table = groups_table(*RANK_HEADS[:3], who=RANK_HEADS[3], figure_width=_FIGURE_WIDTH, heading_width=_RANK_WIDTH)
    table.add_column(RANK_HEADS[4], overflow="fold")
    for cells in rank_rows(report):
        table.add_row(*cells)
    return table


def rank_rows(report: RanksReport) -> "Iterator[tuple[str, ...]]":
    """The cells of each rank under RANK_HEADS, the worst rank first."""
    for each in report.ranks:
        failed = each.report.out_of_memory is not None
        phase = each.report.peak_phase.value if each.report.peak_phase else ""
        sizes = (format_mib(each.report.peak_bytes), format_mib(each.report.reserved_bytes))
        yield str(each.rank), *sizes, "out of memory" if failed else phase, _excess(each, report.lowest)


def _excess(each: RankPeak, lowest: RankPeak) -> str:
    """At most three roles that take more on this rank than on the rank with the lowest peak."""
    more = {role: each.report.roles[role] - lowest.report.roles[role] for role in Role}
    largest = sorted((role for role in Role if more[role] > 0), key=lambda role: -more[role])[:_MOST_NAMED]
    named = (f"{role.value} {text}" for role in largest if (text := format_mib(more[role])) != format_mib(0))
    return ", ".join(named)


def _spreads_table(rows: "Sequence[tuple[str, ...]]") -> "Table":
    table = groups_table(*SPREAD_HEADS, figure_width=_RANK_WIDTH)
    for cells in rows:
        table.add_row(*cells)
    return table


def spread_rows(report: RanksReport) -> "Iterator[tuple[str, ...]]":
    """The cells under SPREAD_HEADS of each role whose bytes differ visibly between ranks."""
    for spread in report.spreads:
        least, most = (each.report.roles[spread.role] for each in (spread.least, spread.most))
        ranks = (str(spread.least.rank), str(spread.most.rank))
        if (difference := format_mib(most - least)) != format_mib(0):
            yield spread.role.value, format_mib(least), ranks[0], format_mib(most), ranks[1], difference
