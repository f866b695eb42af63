"""Render `ligerprof explain`: the peak, its roles and largest blocks, a failed allocation, and suggestions."""

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from textwrap import wrap

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from ligerprof.analyzers.attribution.owners import PYTHON
from ligerprof.analyzers.explain.alloc_settings import SettingsOutcome
from ligerprof.analyzers.explain.failure import Cause, FailedAllocation, Failure, FreeReason
from ligerprof.analyzers.explain.groups import BlockGroup, join_layers
from ligerprof.analyzers.explain.peak import PeakReport
from ligerprof.analyzers.explain.steps import Growth
from ligerprof.analyzers.suggestions.rows import Basis, Suggestion
from ligerprof.reports.terminal import (
    FiguresColumn,
    cut,
    groups_table,
    percent_share,
    roles_table,
    stacked,
)
from ligerprof.roles import MemoryBreakdown, Phase, Role, View
from ligerprof.units import NO_BREAK, format_bytes, format_like, format_mib, in_one_unit, prints_as_zero, unbroken

_MOST = 8
# spaces before a line to copy
_COPIED = 4


def suggestion_lines(suggestions: Sequence[Suggestion]) -> Iterator[str]:
    """Lines of text, the cheapest suggestion first; none without suggestions."""
    if not suggestions:
        return
    failed = any(suggestion.lets_pass is not None for suggestion in suggestions)
    yield "What would have let it pass, the cheapest first:" if failed else "What lowers the peak, the cheapest first:"
    for suggestion in suggestions[:_MOST]:
        yield f"- {suggestion.change}"
        yield f"  {_effect(suggestion)}. Cost: {suggestion.cost.value}; {suggestion.cost_reason}."
        if suggestion.condition:
            yield f"  {suggestion.condition}."
        yield from (f"    {line}" for line in suggestion.how)


def indented(line: str) -> RenderableType:
    """A line of prose, wrapped with its indent; one of a file or a program, after four spaces, as it is."""
    indent = len(line) - len(line.lstrip(" "))
    if indent >= _COPIED:
        return Text(line, no_wrap=True, overflow="ignore")
    return _Prose(line, indent) if indent else line


@dataclass(frozen=True, slots=True)
class _Prose:
    """A line of words that stays below its start where it is wrapped."""

    line: str
    indent: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        following = " " * self.indent
        line = unbroken(self.line)
        lines = wrap(line, options.max_width, subsequent_indent=following, break_on_hyphens=False)
        yield Text("\n".join(lines).replace(NO_BREAK, " "), no_wrap=True, overflow="ignore")


def _effect(suggestion: Suggestion) -> str:
    if suggestion.saves_reserved_bytes is not None and suggestion.new_reserved_bytes is not None:
        reserved = format_bytes(suggestion.new_reserved_bytes)
        if suggestion.lets_pass:
            return f"reserves {reserved} with the request, enough"
        return (
            f"reserves {reserved}, {format_like(suggestion.saves_reserved_bytes, suggestion.new_reserved_bytes)} less"
        )
    if suggestion.saves_bytes is None or suggestion.new_peak_bytes is None:
        return "saving not computed"
    verdict = {True: ", enough", False: ", not enough alone", None: ""}[suggestion.lets_pass]
    peak = format_bytes(suggestion.new_peak_bytes)
    saves = format_like(suggestion.saves_bytes, suggestion.new_peak_bytes)
    saves, peak = {
        Basis.REPLAYED: (saves, peak),
        Basis.AT_LEAST: (f"at least {saves}", f"at most {peak}"),
        Basis.ESTIMATED: (f"about {saves} (estimated)", f"about {peak}"),
    }[suggestion.basis]
    return f"saves {saves}, new peak {peak}{verdict}"


_MOST_HOLDERS = 3
_MOST_GROWTHS = 3
# smaller differences are those of one batch to the next
_LARGER_RATIO = 1.05


def failure_lines(oom: FailedAllocation) -> list[str]:
    """The failure in sentences; the first two say that memory ran out."""
    return [*heading_lines(oom), *earlier_lines(oom), *growth_lines(oom), *free_lines(oom)]


def heading_lines(oom: FailedAllocation) -> Iterator[str]:
    """What was requested, when and where, and the largest holders."""
    caught = ", caught" if oom.caught else ""
    requested = format_like(oom.requested_bytes, oom.allocated_bytes) if oom.requested_bytes else "an allocation"
    held = format_bytes(oom.allocated_bytes)
    yield f"Out of memory{_when(oom)}{caught}: {requested} requested, {held} allocated."
    yield f"Out of memory {_where(oom)}."
    yield f"Held then: {holders(oom.roles)}."


def holders(roles: MemoryBreakdown, highest_bytes: int = 0) -> str:
    """The largest roles with their shares, such as `logits 11.74 GiB (76.6 %)`, in the unit of the highest bytes."""
    largest = sorted((role for role in Role if roles[role]), key=lambda role: -roles[role])[:_MOST_HOLDERS]
    total_bytes = roles.total_bytes
    sizes = ((role.value, roles[role]) for role in largest)
    return ", ".join(
        f"{name} {format_like(size, max(total_bytes, highest_bytes))} ({percent_share(size, total_bytes)})"
        for name, size in sizes
    )


def free_lines(oom: FailedAllocation) -> Iterator[str]:
    """What was free, why it did not serve, and how much was missing."""
    reserved, free = format_bytes(oom.reserved_bytes), format_like(oom.reserved_free_bytes, oom.reserved_bytes)
    yield f"Reserved {reserved}, of which {free} free{_pieces(oom)}."
    if oom.fragmented:
        yield "Fragmentation: enough is free, but in pieces that are too small" + _remedy(oom)
    needed, left = format_bytes(oom.needed_bytes), oom.device_free_bytes
    if oom.limit_bytes is not None and oom.missing_bytes is not None:
        yield (
            f"The limit on reserved memory is {format_bytes(oom.limit_bytes)}, and a new segment takes {needed}: "
            f"{format_bytes(oom.missing_bytes)} were missing."
        )
        return
    if left is None or oom.missing_bytes is None:
        return
    missing = format_bytes(oom.missing_bytes)
    if oom.cause is Cause.LIMIT:
        yield (
            f"The device had {format_bytes(left)} left: a limit on this process was reached. A new segment takes "
            f"{needed}; {'at most ' if oom.missing_is_bound else ''}{missing} more would have been enough."
        )
    else:
        yield f"The device had {format_bytes(left)} left, a new segment takes {needed}: {missing} were missing."


def growth_lines(oom: FailedAllocation) -> Iterator[str]:
    """What grew from step to step before the failure, and larger tensors than before."""
    if len(oom.growth) > 1:
        total = format_bytes(oom.growth_per_step_bytes)
        yield f"{len(oom.growth)} call sites grew from step to step, together by {total} in each. The fastest:"
    for growth in oom.growth[:_MOST_GROWTHS]:
        yield growth_sentence(growth)
    ratio = oom.larger_than_before
    if ratio is not None and ratio >= _LARGER_RATIO:
        yield (
            f"The forward pass's tensors are {ratio:.2g} times as large as in any step before: "
            "a longer sequence or a larger batch."
        )


def growth_sentence(growth: Growth) -> str:
    """What grew by how much in how many steps."""
    size, held = format_bytes(growth.per_step_bytes), format_bytes(growth.held_bytes)
    blocks = f"{growth.held_blocks} blocks of {held}" if growth.held_blocks > 1 else held
    kept = "none freed" if growth.per_step_blocks else "the old one freed for a larger one each time"
    called = f", called from {growth.called_from}" if growth.called_from not in ("", growth.frame) else ""
    who = growth.who or "an unknown call site"
    return (
        f"Grew by {size} in each of {growth.steps} steps: {growth.role.value} of {who}{called}; {blocks} held, {kept}."
    )


def earlier_lines(oom: FailedAllocation) -> Iterator[str]:
    """Whether the program went on, and what failed before."""
    if oom.caught:
        yield "The program caught this failure and went on."
    if oom.earlier_count:
        first = oom.earlier[0]
        size = format_bytes(first.requested_bytes)
        failures = "failure" if oom.earlier_count == 1 else "failures"
        yield f"{oom.earlier_count} earlier {failures}, caught; the newest{_when(first)}: {size} requested."


def _when(failure: Failure) -> str:
    phase = f" in {failure.phase.value}" if failure.phase else ""
    return f"{phase} of step {failure.step}" if failure.step else phase


def _where(oom: FailedAllocation) -> str:
    """Such as "in `to` at loss_utils.py:59 ForCausalLMLoss", with the module and the script's line if known."""
    if oom.frame and ":" not in oom.frame:
        # an autograd node says what it computes
        called = f"in {oom.frame}"
    else:
        # a function that allocates itself is its own operation
        names_itself = oom.operation in ("", oom.frame.rpartition(" ")[2])
        called = " at ".join(filter(None, ("" if names_itself else f"`{oom.operation}`", oom.frame)))
        called = called and f"{'at' if names_itself else 'in'} {called}"
    module = f"{'of' if called else 'in'} {oom.module}" if oom.module else ""
    place = " ".join(filter(None, (called, module))) or "at an unknown call site"
    return f"{place}, called from {oom.called_from}" if oom.called_from not in ("", oom.frame) else place


def _pieces(oom: FailedAllocation) -> str:
    parts = []
    for free in oom.free[:_MOST_HOLDERS]:
        size = f"{format_bytes(free.size_bytes)} " if len(oom.free) > 1 else ""
        # the largest piece shows how far the request was from fitting
        largest = f" (largest {format_bytes(free.largest_bytes)})" if free.reason is FreeReason.TOO_SMALL else ""
        parts.append(f"{size}{free.reason.meaning}{largest}")
    return f": {'; '.join(parts)}" if parts else ""


def _remedy(oom: FailedAllocation) -> str:
    if not oom.pins:
        return "."
    pin = oom.pins[0]
    held = ", ".join(f"{role.value} {format_bytes(size)}" for role, size in pin.roles.items())
    free, size = format_like(pin.free_bytes, pin.segment_bytes), format_bytes(pin.segment_bytes)
    return f". The segment with most of it ({free} of {size}) is held by {held}."


# figures and roles keep their width; in a narrow terminal, the last column wraps
_FIGURE_WIDTH = 9
# of a C++ function, in an 80-column terminal
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
def render_peak(report: PeakReport, *, by: View = View.ROLE, top: int = 10) -> RenderableType:
    """Lay out the report, at most 100 columns wide; `by`: how the first table groups the bytes."""
    peak = [sentence(report), *phase_lines(report), *finding_lines(report)]
    suggestions = map(indented, suggestion_lines(report.suggestions))
    notes = [f"Note: {note}." for note in report.notes]
    oom = report.out_of_memory
    if oom is not None:
        details = _details(oom, "at the failure", by, top)
        return stacked(*failure_lines(oom), *_answer(report.suggestions), *details, *suggestions, *peak, *notes)
    return stacked(*peak, *_details(report, "at the peak", by, top), *suggestions, *notes)


def _answer(suggestions: Sequence[Suggestion]) -> Iterator[str]:
    """The changes that are enough, in one line for the first screen."""
    enough = [suggestion.change.partition(",")[0] for suggestion in suggestions if suggestion.lets_pass]
    if enough:
        more = f"; {len(enough) - _MOST_HOLDERS} more" if len(enough) > _MOST_HOLDERS else ""
        yield f"Enough alone, the cheapest first: {'; '.join(enough[:_MOST_HOLDERS])}{more}. How is below the tables."


def _details(moment: PeakReport | FailedAllocation, title: str, by: View, top: int) -> Iterator[RenderableType]:
    """Roles and largest blocks of one moment."""
    yield roles_table([FiguresColumn(title=title, roles=moment.roles)]) if by is View.ROLE else _view(moment, by)
    yield blocks_table(moment.blocks, top)
    yield from (*_stack_lines(moment.blocks, top), *_unknown_keepers(moment))


def sentence(report: PeakReport) -> str:
    """The peak and its three largest holders in one sentence."""
    highest_bytes = max(report.peak_bytes, report.reserved_bytes)
    when = f" in {report.peak_phase.value}" if report.peak_phase else ""
    reserved = format_like(report.reserved_bytes, highest_bytes)
    peak, held = format_like(report.peak_bytes, highest_bytes), holders(report.roles, highest_bytes)
    return f"Peak {peak}{when} (reserved {reserved}), held by {held}."


def phase_lines(report: PeakReport) -> list[str]:
    """The peak of each phase in one line; empty if the report has no phases."""
    peaks = ", ".join(f"{phase.value} {format_like(size, report.peak_bytes)}" for phase, size in report.phases.items())
    return [f"Highest in each phase: {peaks}."] if peaks else []


def _view(report: PeakReport | FailedAllocation, by: View) -> Table:
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


def blocks_table(groups: Iterable[BlockGroup], top: int, *, more: str = "--top shows more") -> Table:
    """The largest groups, all layers joined: what they are, who allocated and what keeps them; the rest as `more`."""
    rows = _join_lines(join_layers(groups))
    table = groups_table("role", "MiB", "blocks", who="allocated by, and kept by", figure_width=0, heading_width=0)
    for row in rows[:top]:
        table.add_row(row.role.value, format_mib(row.size_bytes), str(row.count), "\n".join(_who(row)))
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
            yield from (f"    {line}" for line in calls or (cut(function, _FUNCTION_WIDTH) for function in row.frames))
            yield ""


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
    growth = report.growth if report.out_of_memory is None else None
    return [] if growth is None else [growth_sentence(growth)]


_HEADS = ("reserved", "saved", "needed", "retries")
_SETTINGS_FIGURE_WIDTH = 8


def render_settings(report: PeakReport) -> RenderableType:
    """The settings that were tried, best first, or why there are none."""
    tried = report.alloc_confs
    if tried is None:
        return stacked(
            "Other settings of the allocator cannot be replayed: the recording does not start with an empty device, has"
            " memory pools of its own, or does not follow from its own settings."
        )
    table = groups_table(
        *_HEADS, who="MiB under PYTORCH_CUDA_ALLOC_CONF", figure_width=_SETTINGS_FIGURE_WIDTH, heading_width=0
    )
    for one in _shown(tried):
        needed = "" if one.smallest_limit_bytes is None else format_mib(one.smallest_limit_bytes)
        passed = " lets it pass" if one.fits else ""
        table.add_row(
            format_mib(one.reserved_bytes),
            format_mib(one.saves_bytes),
            needed,
            str(one.retries),
            f"{one.alloc_conf or 'torch defaults'}{passed}",
        )
    until = " up to the failure" if report.out_of_memory is not None else ""
    text = (
        f"Other settings of the allocator, replayed{until}. As recorded, {format_bytes(report.reserved_bytes)} are"
        " reserved; needed is the least limit on reserved memory under which every request succeeds."
    )
    return stacked(text, table)


def _shown(tried: Sequence[SettingsOutcome]) -> Iterator[SettingsOutcome]:
    """Those that no part of them equals."""
    for one in tried:
        parts = (other for other in tried if other.conf.items() < one.conf.items())
        if not any(
            (bool(other.fits), -other.reserved_bytes) >= (bool(one.fits), -one.reserved_bytes) for other in parts
        ):
            yield one
