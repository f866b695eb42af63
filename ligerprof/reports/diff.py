"""Render what differs: `compare` of several sources, `diff` of two peaks, and `explain` of several ranks."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import RenderableType
from rich.table import Table

from ligerprof.analyzers.compare import Comparison, Figures
from ligerprof.models.architectures import without_indices
from ligerprof.reports.terminal import FiguresColumn, groups_table, phases_table, roles_table, stacked
from ligerprof.roles import Role
from ligerprof.units import format_bytes, format_like, format_mib, in_one_unit, prints_as_zero

if TYPE_CHECKING:
    from ligerprof.analyzers.explain.peak import GroupChange, PeakDiff, PeakReport
    from ligerprof.analyzers.explain.ranks import RankPeak, RanksReport


_MOST_REMEDIES = 8

_SUFFIXES = re.compile(r"(\.(json|pickle|pkl|gz|xz))+$")


def render_comparison(comparison: Comparison) -> RenderableType:
    """Lay out a comparison; one line per source names its column."""
    titles = column_titles(comparison)
    columns = [_column(title, item) for title, item in zip(titles, comparison.columns, strict=True)]
    distance = "error" if comparison.is_of_one_step else "difference"
    return stacked(
        *(f"{title}: {item.source}" for title, item in zip(titles, comparison.columns, strict=True)),
        *_failure_lines(titles, comparison),
        f"{distance}: against {titles[comparison.reference]}",
        phases_table(columns, reference=comparison.reference, distance=distance),
        roles_table(columns, reference=comparison.reference, distance=distance),
    )


def _column(title: str, item: Figures) -> FiguresColumn:
    """A column; if memory ran out, with the roles of that moment and without phases that were not reached."""
    if item.oom is None:
        return FiguresColumn(title=title, roles=item.roles, phases=item.phases, peak_bytes=item.peak_bytes)
    phases = {phase: size_bytes for phase, size_bytes in item.phases.items() if size_bytes}
    roles = item.oom.roles or item.roles
    return FiguresColumn(title=title, roles=roles, phases=phases, peak_bytes=item.peak_bytes, comparable=False)


def _failure_lines(titles: Sequence[str], comparison: Comparison) -> Iterator[str]:
    for title, item in zip(titles, comparison.columns, strict=True):
        if (oom := item.oom) is not None:
            phase = f" in {oom.phase.value}" if oom.phase else ""
            step = f" of step {oom.step}" if oom.step is not None else ""
            sizes = ((oom.requested_bytes, "requested"), (oom.allocated_bytes, "allocated"))
            figures = ", ".join(f"{format_bytes(size)} {word}" for size, word in sizes if size is not None)
            yield f"{title}: out of memory{phase}{step}{f': {figures}' if figures else ''}."
            if item.remedies:
                remedies = ", ".join(item.remedies[:_MOST_REMEDIES])
                yield f"{title}: each of these alone would have let it pass: {remedies}. `ligerprof explain` shows how."
    if any(item.oom is not None for item in comparison.columns):
        yield "Where memory ran out, the roles are those of that moment, and the phases what was reached."


def column_titles(comparison: Comparison) -> list[str]:
    """A short name for each column: its rank, or its backend, with the source's name or number if backends repeat."""
    if all(column.rank is not None for column in comparison.columns):
        return [f"rank {column.rank}" for column in comparison.columns]
    backends = [column.backend for column in comparison.columns]
    if len(set(backends)) == len(backends):
        return list(backends)
    names = [f"{_SUFFIXES.sub('', Path(column.file).name)} {column.backend}" for column in comparison.columns]
    if len(set(names)) == len(names):
        return names
    return [f"{index} {column.backend}" for index, column in enumerate(comparison.columns, 1)]


_MOST_NAMED = 3
_FIGURE_WIDTH = 11


@in_one_unit(lambda diff, **_: max(diff.before.peak_bytes, diff.after.peak_bytes))
def render_diff(diff: "PeakDiff", *, top: int = 10) -> RenderableType:
    """Lay out what changed between two peaks, at most 100 columns wide, with `top` rows of block groups."""
    notes = [f"Note: {note}." for note in diff.notes]
    return stacked(difference_sentence(diff), _roles_table(diff), changes_table(diff, top), *notes)


def difference_sentence(diff: "PeakDiff") -> str:
    """The change of the peak, and the roles that changed most."""
    # one unit for the whole sentence: that of the higher peak
    higher_bytes = max(diff.before.peak_bytes, diff.after.peak_bytes)
    peaks = f"from {_peak(diff.before, higher_bytes)} to {_peak(diff.after, higher_bytes)}"
    changes = {role: diff.role_difference_bytes(role) for role in Role}
    largest = sorted((role for role in Role if changes[role]), key=lambda role: -abs(changes[role]))[:_MOST_NAMED]
    named = ", ".join(f"{role.value} {_signed(changes[role], higher_bytes)}" for role in largest) or "no role changed"
    if diff.difference_bytes == 0:
        return f"The peak is the same, {_peak(diff.before, higher_bytes)}: {named}."
    verb = "grew" if diff.difference_bytes > 0 else "fell"
    return f"The peak {verb} by {format_like(abs(diff.difference_bytes), higher_bytes)}, {peaks}: {named}."


def _peak(report: "PeakReport", higher_bytes: int) -> str:
    return f"{format_like(report.peak_bytes, higher_bytes)}{_when(report)}"


def change_rows(diff: "PeakDiff") -> Iterator[tuple[str, int, int]]:
    """Name, bytes before and bytes after of each role that does not print as zero in both."""
    for role in Role:
        before, after = diff.before.roles[role], diff.after.roles[role]
        if not (prints_as_zero(before) and prints_as_zero(after)):
            yield role.value, before, after


def total_rows(diff: "PeakDiff") -> Iterator[tuple[str, int, int]]:
    """Name, bytes before and bytes after of the peak, the reserved bytes and each phase."""
    yield "peak", diff.before.peak_bytes, diff.after.peak_bytes
    yield "reserved", diff.before.reserved_bytes, diff.after.reserved_bytes
    for phase in diff.common_phases:
        yield f"highest in {phase.value}", diff.before.phases[phase], diff.after.phases[phase]


def _roles_table(diff: "PeakDiff") -> Table:
    table = groups_table("role", "before, MiB", "after, MiB", "change, MiB", figure_width=_FIGURE_WIDTH)
    for row in change_rows(diff):
        table.add_row(*change_cells(*row))
    table.add_section()
    for row in total_rows(diff):
        table.add_row(*change_cells(*row))
    return table


def change_cells(name: str, before_bytes: int, after_bytes: int) -> list[str]:
    """A row of text: name, before, after and change, in MiB."""
    return [name, format_mib(before_bytes), format_mib(after_bytes), signed_mib(after_bytes - before_bytes)]


class GroupRow(NamedTuple):
    """The groups of one role and call site, all layers together."""

    role: str
    who: str
    change_bytes: int
    counts: str


def group_rows(diff: "PeakDiff") -> list[GroupRow]:
    """The groups that changed, the largest change first; those of all layers share a row."""
    merged: dict[tuple[str, str], list[GroupChange]] = defaultdict(list)
    for group in diff.groups:
        merged[group.place.role.value, _who(group)].append(group)
    rows = [
        GroupRow(role, who, change, _counts(groups))
        for (role, who), groups in merged.items()
        if (change := sum(group.difference_bytes for group in groups))
    ]
    return sorted(rows, key=lambda row: -abs(row.change_bytes))


def changes_table(diff: "PeakDiff", top: int) -> Table:
    """The `top` groups that changed most."""
    rows = group_rows(diff)
    table = groups_table("role", "change, MiB", "blocks", who="allocated by", figure_width=_FIGURE_WIDTH)
    for row in rows[:top]:
        table.add_row(row.role, signed_mib(row.change_bytes), row.counts, row.who)
    if rest := rows[top:]:
        table.add_section()
        table.add_row(
            f"{len(rest)} more rows", signed_mib(sum(row.change_bytes for row in rest)), "", "--top shows more"
        )
    return table


def _counts(groups: "Sequence[GroupChange]") -> str:
    before, after = sum(group.before_count for group in groups), sum(group.after_count for group in groups)
    return str(before) if before == after else f"{before} > {after}"


def _who(group: "GroupChange") -> str:
    if group.place.module:
        return without_indices(group.place.module)
    before, after = (", ".join(frames) for frames in (group.frames_before, group.frames_after))
    return before if before == after or not after else f"{before} > {after}" if before else after


def _signed(size_bytes: int, higher_bytes: int) -> str:
    return f"{'+' if size_bytes > 0 else ''}{format_like(size_bytes, higher_bytes)}"


def signed_mib(size_bytes: int) -> str:
    """A change in MiB with its sign."""
    text = format_mib(size_bytes)
    # a change that rounds to zero has no sign
    return format_mib(0) if text.lstrip("-") == format_mib(0) else f"{'+' if size_bytes > 0 else ''}{text}"


RANK_HEADS = ("rank", "peak, MiB", "reserved, MiB", "highest in", "more than the lowest rank, MiB")
SPREAD_HEADS = ("role", "least, MiB", "rank", "most, MiB", "rank", "difference")
_RANK_WIDTH = 5


def render_ranks(report: "RanksReport", *, top: int = 10) -> RenderableType:
    """Lay out the ranks, worst first, at most 100 columns wide, with `top` rows of block groups."""
    parts: list[RenderableType] = [ranks_sentence(report), *ranks_tables(report)]
    parts += cause_lines(report)
    if report.difference.difference_bytes:
        lowest, worst = report.lowest.rank, report.worst.rank
        parts += [f"From rank {lowest} to rank {worst}:", changes_table(report.difference, top)]
    parts += [f"Note: {note}." for note in report.notes]
    parts.append(f"ligerprof explain {report.worst.source} shows the blocks of rank {report.worst.rank}.")
    return stacked(*parts)


def ranks_tables(report: "RanksReport") -> list[RenderableType]:
    """The ranks, the worst first, and the roles in which they differ, if any."""
    spreads = groups_table(*SPREAD_HEADS, figure_width=_RANK_WIDTH)
    for cells in spread_rows(report):
        spreads.add_row(*cells)
    return [_ranks_table(report), *([spreads] if spreads.rows else [])]


def ranks_sentence(report: "RanksReport") -> str:
    """Which rank is the worst, and by how much."""
    worst, lowest, count = report.worst, report.lowest, len(report.ranks)
    failed = sorted(each.rank for each in report.ranks if each.report.out_of_memory is not None)
    peak = f"{format_bytes(worst.report.peak_bytes)}{_when(worst.report)}"
    if failed:
        ranks = "rank" if len(failed) == 1 else "ranks"
        return f"Out of memory on {ranks} {', '.join(map(str, failed))} of {count}; rank {worst.rank} peaks at {peak}."
    if not report.difference.difference_bytes:
        return f"All {count} ranks peak at {format_bytes(worst.report.peak_bytes)}."
    sizes = (report.difference.difference_bytes, lowest.report.peak_bytes)
    more, least = (format_like(size, worst.report.peak_bytes) for size in sizes)
    return f"Rank {worst.rank} of {count} has the highest peak, {peak}: {more} more than rank {lowest.rank} ({least})."


def cause_lines(report: "RanksReport") -> Iterator[str]:
    """Why ranks hold more than the lowest one, the worst first; ranks of the same reasons together."""
    ranks_of: dict[tuple[str, ...], list[int]] = {}
    for rank, found in report.causes.items():
        ranks_of.setdefault(tuple(cause.text for cause in found), []).append(rank)
    for texts, ranks in ranks_of.items():
        if texts:
            which = f"Rank {ranks[0]}" if len(ranks) == 1 else f"Ranks {', '.join(map(str, sorted(ranks)))}"
            yield f"{which}, unlike rank {report.lowest.rank}:"
            yield from (f"- {text}" for text in texts)


def _when(report: "PeakReport") -> str:
    return f" in {report.peak_phase.value}" if report.peak_phase else ""


def _ranks_table(report: "RanksReport") -> Table:
    table = groups_table(*RANK_HEADS[:3], who=RANK_HEADS[3], figure_width=_FIGURE_WIDTH, heading_width=_RANK_WIDTH)
    table.add_column(RANK_HEADS[4], overflow="fold")
    for cells in rank_rows(report):
        table.add_row(*cells)
    return table


def rank_rows(report: "RanksReport") -> Iterator[tuple[str, ...]]:
    """The cells of each rank under RANK_HEADS, the worst rank first."""
    for each in report.ranks:
        failed = each.report.out_of_memory is not None
        phase = each.report.peak_phase.value if each.report.peak_phase else ""
        sizes = (format_mib(each.report.peak_bytes), format_mib(each.report.reserved_bytes))
        yield str(each.rank), *sizes, "out of memory" if failed else phase, _excess(each, report.lowest)


def _excess(each: "RankPeak", lowest: "RankPeak") -> str:
    """At most three roles that take more on this rank than on the rank with the lowest peak."""
    more = {role: each.report.roles[role] - lowest.report.roles[role] for role in Role}
    largest = sorted((role for role in Role if more[role] > 0), key=lambda role: -more[role])[:_MOST_NAMED]
    named = (f"{role.value} {text}" for role in largest if (text := format_mib(more[role])) != format_mib(0))
    return ", ".join(named)


def spread_rows(report: "RanksReport") -> Iterator[tuple[str, ...]]:
    """The cells under SPREAD_HEADS of each role whose bytes differ visibly between ranks."""
    for spread in report.spreads:
        least, most = (each.report.roles[spread.role] for each in (spread.least, spread.most))
        ranks = (str(spread.least.rank), str(spread.most.rank))
        if (difference := format_mib(most - least)) != format_mib(0):
            yield spread.role.value, format_mib(least), ranks[0], format_mib(most), ranks[1], difference
