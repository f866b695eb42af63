"""Render `ligerprof explain`: one sentence on the peak, its roles, and its largest blocks."""

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from ligerprof.analyzers.attribution.owners import PYTHON
from ligerprof.analyzers.explain.failure import FailedAllocation
from ligerprof.analyzers.explain.groups import BlockGroup, join_layers
from ligerprof.analyzers.explain.peak import PeakReport
from ligerprof.reports.failure import failure_lines, growth_sentence
from ligerprof.reports.suggestions import suggestion_block
from ligerprof.reports.terminal import FiguresColumn, file_text, groups_table, percent_share, roles_table
from ligerprof.roles import Phase, Role, View
from ligerprof.units import format_bytes, format_like, format_mib, in_one_unit, prints_as_zero

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

# figures and roles keep their width; in a narrow terminal, the last column wraps
_FIGURE_WIDTH = 9
_FUNCTION_WIDTH = 75
_VISIBLE_SHARE = 0.01
_LINE = re.compile(r"(?P<file>.*):(?P<line>[0-9]{1,9}) (?P<function>\S+)")
_CALL = re.compile(r":\d+ \S+$")
_KEPT_FOR_BACKWARD = frozenset(
    {Role.ACTIVATIONS, Role.ATTENTION_TEMPORARIES, Role.LOGITS, Role.SHIFT_LOGITS, Role.CE_TEMPORARIES}
)


def largest_bytes(report: PeakReport) -> int:
    """The largest size of a report, which decides the unit of the others."""
    failed = report.out_of_memory
    return max(report.peak_bytes, report.reserved_bytes, 0 if failed is None else failed.reserved_bytes)


@in_one_unit(lambda report, **_: largest_bytes(report))
def render_peak(report: PeakReport, *, by: View = View.ROLE, top: int = 10) -> "RenderableType":
    """Lay out the report, at most 100 columns wide.

    Args:
        by: how the first table groups the bytes.
        top: number of rows of blocks.
    """
    from rich.console import Group
    from rich.text import Text

    peak = [Text(line) for line in (sentence(report), *phase_lines(report), *finding_lines(report))]
    suggestions = [suggestion_block(report.suggestions)] if report.suggestions else []
    notes = [Text(f"Note: {note}.") for note in report.notes]
    oom = report.out_of_memory
    if oom is not None:
        failure = [Text(line) for line in failure_lines(oom)]
        return Group(*failure, *_details(oom, "at the failure", by, top), *suggestions, *peak, *notes)
    return Group(*peak, *_details(report, "at the peak", by, top), *suggestions, *notes)


def _details(moment: PeakReport | FailedAllocation, title: str, by: View, top: int) -> "Iterator[RenderableType]":
    """Roles and largest blocks of one moment."""
    yield roles_table([FiguresColumn(title=title, roles=moment.roles)]) if by is View.ROLE else _view(moment, by)
    yield blocks_table(moment.blocks, top)
    yield from (file_text(line) for line in (*_stack_lines(moment.blocks, top), *_unknown_keepers(moment)))


def sentence(report: PeakReport) -> str:
    """The peak and its three largest holders in one sentence."""
    holders = sorted((role for role in Role if report.roles[role]), key=lambda role: -report.roles[role])[:3]
    peak_bytes, highest_bytes = report.peak_bytes, max(report.peak_bytes, report.reserved_bytes)
    sizes = ((role.value, report.roles[role]) for role in holders)
    shares = ", ".join(
        f"{name} {format_like(size_bytes, highest_bytes)} ({percent_share(size_bytes, peak_bytes)})"
        for name, size_bytes in sizes
    )
    when = f" in {report.peak_phase.value}" if report.peak_phase else ""
    reserved = format_like(report.reserved_bytes, highest_bytes)
    return f"Peak {format_like(peak_bytes, highest_bytes)}{when} (reserved {reserved}), held by {shares}."


def phase_lines(report: PeakReport) -> list[str]:
    """The peak of each phase in one line; empty if the report has no phases."""
    peaks = ", ".join(f"{phase.value} {format_like(size, report.peak_bytes)}" for phase, size in report.phases.items())
    return [f"Highest in each phase: {peaks}."] if peaks else []


def _view(report: PeakReport | FailedAllocation, by: View) -> "Table":
    """Bytes by layer or by the phase that allocated them, with rounding in a separate row."""
    totals: dict[str, int] = defaultdict(int)
    total_bytes = report.roles.total_bytes
    if by is View.PHASE:
        totals.update((phase.value, 0) for phase in Phase)
    for block in sorted(report.blocks, key=lambda block: -1 if block.layer is None else block.layer):
        layer = "outside layers" if block.layer is None else f"layer {block.layer}"
        totals[block.phase.value if by is View.PHASE else layer] += block.size_bytes
    totals[Role.ALLOCATOR_ROUNDING.value] = report.roles[Role.ALLOCATOR_ROUNDING]
    table = groups_table("allocated in" if by is View.PHASE else "layer", "MiB", "share", figure_width=_FIGURE_WIDTH)
    # layers in a row that hold the same share one row
    for (size_bytes, of_layers), rows in groupby(totals.items(), lambda row: (row[1], row[0].startswith("layer "))):
        first, *others = (name for name, _ in rows)
        last = others[-1].removeprefix("layer ") if others and of_layers else ""
        name = f"layers {first.removeprefix('layer ')} to {last}, each" if last else first
        if not prints_as_zero(size_bytes):
            table.add_row(name, format_mib(size_bytes), percent_share(size_bytes, total_bytes))
    table.add_section()
    table.add_row("total", format_mib(total_bytes), percent_share(total_bytes, total_bytes))
    return table


def blocks_table(groups: Iterable[BlockGroup], top: int, *, more: str = "--top shows more") -> "Table":
    """The largest groups, all layers joined: what they are, who allocated them, and what keeps them.

    Args:
        more: how to see the other rows.
    """
    rows = _join_lines(join_layers(groups))
    table = groups_table("role", "MiB", "blocks", who="allocated by, and kept by", figure_width=0, heading_width=0)
    for row in rows[:top]:
        table.add_row(row.role.value, format_mib(row.size_bytes), str(row.count), file_text("\n".join(_who(row))))
    if rest := rows[top:]:
        size_bytes, count = sum(row.size_bytes for row in rest), sum(row.count for row in rest)
        table.add_section()
        table.add_row(f"{len(rest)} more rows", format_mib(size_bytes), str(count), more)
    return table


def _join_lines(rows: Iterable[BlockGroup]) -> list[BlockGroup]:
    """Join rows that differ only in the line of one function, such as the three weights of an MLP."""
    joined: dict[Hashable, list[tuple[BlockGroup, str]]] = {}
    for row in rows:
        found = _LINE.fullmatch(row.frame)
        place = (found["file"], found["function"]) if found and not row.frames else row.frame
        line = found["line"] if found else ""
        same = (row.role, row.size_bytes, row.count, row.module, row.phase, row.layers, row.operation)
        joined.setdefault((place, same, row.kept_by, row.kept_in, row.frames), []).append((row, line))
    merged = []
    for members in joined.values():
        row = members[0][0]
        lines = ", ".join(sorted((line for _, line in members), key=int)) if len(members) > 1 else ""
        found = _LINE.fullmatch(row.frame)
        frame = f"{found['file']}:{lines} {found['function']}" if found and lines else row.frame
        size_bytes, count = sum(one.size_bytes for one, _ in members), sum(one.count for one, _ in members)
        merged.append(replace(row, frame=frame, size_bytes=size_bytes, count=count))
    return sorted(merged, key=lambda row: -row.size_bytes)


def _who(row: BlockGroup) -> Iterator[str]:
    """The lines on a row's allocation, its layers and keeper, and its stack if the row has one."""
    place = row.frame.removesuffix(" forward") if row.module else row.frame
    # a node says what it computes, and a function that allocates itself is its own operation
    is_node, function = ":" not in row.frame, row.frame.rpartition(" ")[2]
    operation = "" if is_node or row.operation == function else row.operation
    called = f"{operation} in {place}" if operation and place else operation or place
    yield f"{row.module}: {called}" if row.module and called else row.module or called
    kept = f"kept by {row.kept_by}" if row.kept_by else ""
    if row.kept_by == PYTHON:
        kept = f"kept by Python until {row.kept_in}"
    elif row.kept_in and row.kept_in != row.module:
        # in the same layer, the rest of the name is enough
        layer = row.module[: row.module.rfind(".*.") + len(".*.")] if ".*." in row.module else ""
        kept += f" of {row.kept_in.removeprefix(layer)}"
    if detail := ", ".join(filter(None, (_layers(row.layers), kept))):
        yield detail


def _stack_lines(groups: Iterable[BlockGroup], top: int) -> Iterator[str]:
    """The Python stack of each row of the table, else its C++ stack; nothing if the blocks have no stacks."""
    for row in join_layers(groups)[:top]:
        if row.frames:
            yield f"{row.role.value} {format_mib(row.size_bytes)} MiB, {next(_who(row), '')}"
            calls = [line for line in row.frames if _CALL.search(line)]
            yield from (f"    {line}" for line in calls or map(_cut, row.frames))
            yield ""


def _cut(function: str) -> str:
    """A C++ function in one line of an 80-column terminal."""
    return function if len(function) <= _FUNCTION_WIDTH else f"{function[: _FUNCTION_WIDTH - 1]}…"


def _unknown_keepers(report: PeakReport | FailedAllocation) -> Iterator[str]:
    """One sentence if a visible share of what forward allocated has no known keeper."""
    forward = [block for block in report.blocks if block.phase is Phase.FORWARD and block.role in _KEPT_FOR_BACKWARD]
    unknown_bytes = sum(block.size_bytes for block in forward if not block.kept_by)
    if unknown_bytes < _VISIBLE_SHARE * report.roles.total_bytes:
        return
    hint = "" if any(block.kept_by for block in forward) else "; a recording of ligerprof.record contains it"
    yield f"What keeps {format_bytes(unknown_bytes)} of the forward pass alive is not known{hint}."


def _layers(layers: Sequence[int]) -> str:
    """Layers as text, such as `layers 0-15`; empty outside the layers."""
    if not layers:
        return ""
    starts = [layer for layer in layers if layer - 1 not in layers]
    ends = [layer for layer in layers if layer + 1 not in layers]
    ranges = (str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True))
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(ranges)}"


def finding_lines(report: PeakReport) -> list[str]:
    """What grows, if anything does."""
    if report.growth is not None and report.out_of_memory is None:
        return [growth_sentence(report.growth)]
    return []
