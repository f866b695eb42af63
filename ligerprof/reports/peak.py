"""Render `ligerprof explain`: one sentence on the peak, its roles, and its largest blocks."""

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from ligerprof.analyzers.explain.failure import FailedAllocation
from ligerprof.analyzers.explain.groups import BlockGroup
from ligerprof.analyzers.explain.peak import PeakReport
from ligerprof.models.module_names import without_indices
from ligerprof.reports.terminal import FiguresColumn, groups_table, percent_share, roles_table
from ligerprof.roles import Phase, Role, View
from ligerprof.units import format_bytes, format_mib

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

# figures and roles keep their width; in a narrow terminal, the last column is cut
_FIGURE_WIDTH = 9


def render_peak(report: PeakReport, *, by: View = View.ROLE, top: int = 10) -> "RenderableType":
    """Lay out the report, at most 100 columns wide.

    Args:
        by: how the first table groups the bytes.
        top: number of rows of blocks.
    """
    from rich.console import Group
    from rich.text import Text

    at_peak = FiguresColumn(title="at the peak", roles=report.roles)
    totals = roles_table([at_peak]) if by is View.ROLE else _view(report, by)
    lines = [Text(line) for line in (sentence(report), *phase_lines(report), *finding_lines(report))]
    notes = [Text(f"Note: {note}.") for note in report.notes]
    return Group(*lines, totals, _blocks_table(report, top), *notes)


def sentence(report: PeakReport) -> str:
    """The peak and its three largest holders in one sentence."""
    holders = sorted((role for role in Role if report.roles[role]), key=lambda role: -report.roles[role])[:3]
    shares = ", ".join(
        f"{role.value} {format_bytes(report.roles[role])} ({percent_share(report.roles[role], report.peak_bytes)})"
        for role in holders
    )
    when = f" in {report.peak_phase.value}" if report.peak_phase else ""
    reserved = format_bytes(report.reserved_bytes)
    return f"Peak {format_bytes(report.peak_bytes)}{when} (reserved {reserved}), held by {shares}."


def phase_lines(report: PeakReport) -> list[str]:
    """The peak of each phase in one line; empty if the report has no phases."""
    peaks = ", ".join(f"{phase.value} {format_bytes(size)}" for phase, size in report.phases.items())
    return [f"Highest in each phase: {peaks}."] if peaks else []


def _view(report: PeakReport, by: View) -> "Table":
    """Bytes by layer or by the phase that allocated them, with rounding in a separate row."""
    totals: dict[str, int] = defaultdict(int)
    if by is View.PHASE:
        totals.update((phase.value, 0) for phase in Phase)
    for block in sorted(report.blocks, key=lambda block: -1 if block.layer is None else block.layer):
        layer = "outside layers" if block.layer is None else f"layer {block.layer}"
        totals[block.phase.value if by is View.PHASE else layer] += block.size_bytes
    totals[Role.ALLOCATOR_ROUNDING.value] = report.roles[Role.ALLOCATOR_ROUNDING]
    table = groups_table("allocated in" if by is View.PHASE else "layer", "MiB", "share", figure_width=_FIGURE_WIDTH)
    for name, size_bytes in totals.items():
        if size_bytes:
            table.add_row(name, format_mib(size_bytes), percent_share(size_bytes, report.peak_bytes))
    table.add_section()
    table.add_row("total", format_mib(report.peak_bytes), percent_share(report.peak_bytes, report.peak_bytes))
    return table


def _blocks_table(report: PeakReport, top: int) -> "Table":
    """The largest groups; those of all layers share a row."""
    sizes: Counter[tuple[str, str]] = Counter()
    counts: Counter[tuple[str, str]] = Counter()
    for block in report.blocks:
        row = block.role.value, _who(block)
        sizes[row] += block.size_bytes
        counts[row] += block.count
    rows = [row for row, _ in sizes.most_common()]
    table = groups_table("role", "MiB", "blocks", who="allocated by", figure_width=_FIGURE_WIDTH)
    for role, who in rows[:top]:
        table.add_row(role, format_mib(sizes[role, who]), str(counts[role, who]), who)
    if rest := rows[top:]:
        size_bytes, count = sum(sizes[row] for row in rest), sum(counts[row] for row in rest)
        table.add_section()
        table.add_row(f"{len(rest)} more rows", format_mib(size_bytes), str(count), "--top shows more")
    return table


def _who(block: BlockGroup) -> str:
    module = without_indices(block.module)
    if not module:
        return block.frame
    place = block.frame.removesuffix(" forward")
    return f"{module} ({place})" if place else module


def finding_lines(report: PeakReport) -> list[str]:
    """Why memory ran out, what would lower the peak, and what grows, if any of these applies."""
    lines = _failure_lines(report.out_of_memory) if report.out_of_memory else []
    for what_if in report.what_if[:2]:
        without = ", ".join(role.value for role in what_if.without)
        if what_if.saved_bytes > 0:
            peak = format_bytes(what_if.peak_bytes)
            lines.append(f"Without {without} the peak would be {peak}: {what_if.change} ({what_if.option}).")
    if (growth := report.growth) is not None:
        size, holder = format_bytes(growth.per_step_bytes), " ".join(filter(None, (growth.role.value, growth.who)))
        lines.append(f"Grows by {size} or more in each of {growth.steps} steps: {holder}.")
    return lines


def _failure_lines(oom: FailedAllocation) -> list[str]:
    free, largest = format_bytes(oom.reserved_free_bytes), format_bytes(oom.largest_free_bytes)
    lines = [f"Reserved but free: {free}, the largest piece {largest}: {_verdict(oom)}."]
    if oom.pins and oom.fragmented:
        pin = oom.pins[0]
        holders = ", ".join(f"{role.value} {format_bytes(size)}" for role, size in pin.roles.items())
        lines.append(f"The segment with most of it, {format_bytes(pin.free_bytes)}, is held by {holders}.")
    return lines


def _verdict(oom: FailedAllocation) -> str:
    if oom.fragmented:
        return "fragmentation; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True joins the pieces"
    if oom.device_free_bytes is not None and oom.device_free_bytes >= oom.requested_bytes:
        return "no fragmentation; a limit on this process was reached, not the device's"
    return "no fragmentation, too much is held"
