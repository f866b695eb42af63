"""The report on a device's peak: what the memory belongs to, read back from its JSON, and what differs in another."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ligerprof.analyzers.compare import FailureFigures, Figures, ResultReader
from ligerprof.analyzers.explain.groups import BlockGroup, join_layers
from ligerprof.analyzers.explain.steps import Growth, PhasePeaks
from ligerprof.analyzers.suggestions.rows import Suggestion
from ligerprof.errors import ResultFormatError
from ligerprof.roles import STEP_PHASES, Backend, MemoryBreakdown, Phase, Role
from ligerprof.serialization import SCHEMA, JsonKeys, document, select
from ligerprof.text import printable

if TYPE_CHECKING:
    from ligerprof.analyzers.explain.alloc_settings import SettingsOutcome
    from ligerprof.analyzers.explain.failure import FailedAllocation


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakReport(JsonKeys):
    """What a device's memory at its peak belongs to.

    Attributes:
        peak_bytes: allocated bytes at the peak, as max_memory_allocated() counts them.
        reserved_bytes: the highest reserved bytes.
        complete: whether the recording starts with an empty device.
        roles: add up to `peak_bytes`, rounding included.
        blocks: largest first; their bytes add up to the roles without allocator_rounding.
        phases: the highest allocated bytes in each phase that ran.
        peak_phase: the phase that ran at the peak, None if unknown.
        peak_step: the training step by the stamps, 0 before the first; None without stamps.
        notes: one sentence each.
        out_of_memory: the last allocation that did not fit.
        suggestions: changes that lower the peak, the cheapest first.
        alloc_confs: other settings of the allocator, best first; None if the recording cannot be replayed under them.
    """

    device: int
    peak_bytes: int
    reserved_bytes: int
    complete: bool
    roles: MemoryBreakdown
    blocks: tuple[BlockGroup, ...]
    phases: Mapping[Phase, int] = field(default_factory=dict)
    peak_phase: Phase | None = None
    peak_step: int | None = None
    notes: tuple[str, ...] = ()
    steps: tuple[PhasePeaks, ...] = ()
    out_of_memory: "FailedAllocation | None" = None
    suggestions: tuple[Suggestion, ...] = ()
    growth: Growth | None = None
    alloc_confs: "tuple[SettingsOutcome, ...] | None" = None

    @property
    def rows(self) -> tuple[BlockGroup, ...]:
        """The blocks with all layers joined, largest first; they add up as `blocks` do."""
        return join_layers(self.blocks)

    def to_json(self) -> dict[str, Any]:
        """The object of `ligerprof explain --json`."""
        figures = ("device", "peak_bytes", "reserved_bytes", "complete", "peak_phase", "phases", "roles")
        return document(
            "peak",
            select(self, *figures, "blocks", "rows", "notes", "steps", "oom=out_of_memory", "suggestions"),
            {"what_if": [one.to_what_if() for one in self.suggestions if one.new_reserved_bytes is None]},
            select(self, "growth", "alloc_confs"),
        )


_HINT = "Write it with `ligerprof explain --json`."
_MOST_BLOCKS = 1_000_000


def report_from_json(values: object, source: str) -> PeakReport:
    """The peak in the JSON of `explain`, with every value checked; suggestions, steps and failure are left out.

    Raises:
        ResultFormatError: it is not the JSON of `explain`, has an invalid value, or its roles do not add up.
    """
    result = ResultReader(values, source)
    if (result.get("schema"), result.get("kind")) != (SCHEMA, "peak"):
        raise ResultFormatError(f"{source}: not a peak of schema {SCHEMA}. {_HINT}")
    figures = result.figures(Backend.SNAPSHOT)
    if figures.roles.total_bytes != figures.peak_bytes:
        raise ResultFormatError(f"{source}: the roles do not add up to the peak. {_HINT}")
    entries = result.get("blocks")
    if not isinstance(entries, list) or len(entries) > _MOST_BLOCKS:
        raise ResultFormatError(f"{source}: 'blocks' is missing or not a list. {_HINT}")
    blocks = tuple(_block(entry, f"{source}: block {number}") for number, entry in enumerate(entries, 1))
    sums = dict.fromkeys(Role, 0)
    for block in blocks:
        sums[block.role] += block.size_bytes
    if any(sums[role] != figures.roles[role] for role in Role if role is not Role.ALLOCATOR_ROUNDING):
        raise ResultFormatError(f"{source}: the blocks do not add up to the roles. {_HINT}")
    notes = ("memory ran out, so its peak is what was reached",) if figures.oom is not None else ()
    return PeakReport(
        device=result.size("device"),
        peak_bytes=figures.peak_bytes,
        reserved_bytes=result.size("reserved_bytes"),
        complete=result.get("complete") is True,
        roles=figures.roles,
        blocks=blocks,
        phases=figures.phases,
        peak_phase=_phase(result.text("peak_phase"), source),
        notes=notes,
    )


def _block(entry: object, where: str) -> BlockGroup:
    values = ResultReader(entry, where)
    role, phase = values.text("role"), _phase(values.text("phase"), where)
    if role not in set(Role) or phase is None:
        raise ResultFormatError(f"{where}: no known role and phase. {_HINT}")
    layers: Any = values.get("layers")
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise ResultFormatError(f"{where}: 'layers' is not a list of integers. {_HINT}")
    return BlockGroup(
        role=Role(role),
        size_bytes=values.size("bytes"),
        count=values.size("count"),
        module=printable(values.text("module") or ""),
        frame=printable(values.text("frame") or ""),
        phase=phase,
        layers=tuple(layers),
    )


def _phase(word: str | None, where: str) -> Phase | None:
    if word is not None and word not in set(Phase):
        raise ResultFormatError(f"{where}: phase {word!r:.40} is unknown. Did a newer version write it?")
    return None if word is None else Phase(word)


def figures_from_peak(report: PeakReport, source: str) -> Figures:
    """The figures of an explained snapshot."""
    failed = report.out_of_memory
    oom = None
    if failed is not None and not failed.caught:
        oom = FailureFigures(
            requested_bytes=failed.requested_bytes,
            allocated_bytes=failed.allocated_bytes,
            phase=failed.phase,
            step=failed.step,
            roles=failed.roles,
        )
    return Figures(
        source=source,
        backend=Backend.SNAPSHOT,
        peak_bytes=report.peak_bytes,
        phases=report.phases,
        roles=report.roles,
        oom=oom,
        remedies=tuple(one.name for one in report.suggestions if one.lets_pass),
    )


# the line in `modeling_llama.py:1214 forward`, which changes between versions
_LINE = re.compile(r":\d+ ")


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The part of training that a block belongs to, independent of the code that allocated it."""

    role: Role
    module: str
    layer: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupChange:
    """Groups of blocks at two peaks that are the same part of training; frames of the largest group come first."""

    place: Place
    before_bytes: int
    after_bytes: int
    before_count: int
    after_count: int
    frames_before: tuple[str, ...]
    frames_after: tuple[str, ...]

    @property
    def difference_bytes(self) -> int:
        """Growth in bytes, negative if it shrank."""
        return self.after_bytes - self.before_bytes

    def to_json(self) -> dict[str, Any]:
        """An entry of `blocks` in the JSON."""
        return select(
            self,
            *("place.role", "place.module", "place.layer", "before_bytes", "after_bytes", "difference_bytes"),
            *("before_count", "after_count", "frames_before", "frames_after"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakDiff(JsonKeys):
    """Two peaks and their differences.

    Attributes:
        groups: the largest change first, unchanged groups too; with the change of
            allocator_rounding they add up to the difference of the peaks.
        notes: one sentence each.
    """

    before: PeakReport
    after: PeakReport
    groups: tuple[GroupChange, ...]
    notes: tuple[str, ...] = ()

    @property
    def difference_bytes(self) -> int:
        """Growth of the peak in bytes."""
        return self.after.peak_bytes - self.before.peak_bytes

    def role_difference_bytes(self, role: Role) -> int:
        """Growth of a role in bytes; all roles add up to the difference of the peaks."""
        return self.after.roles[role] - self.before.roles[role]

    @property
    def common_phases(self) -> list[Phase]:
        """The phases that both peaks have."""
        return [phase for phase in STEP_PHASES if phase in self.before.phases and phase in self.after.phases]

    def to_json(self) -> dict[str, Any]:
        """The object of `ligerprof diff --json`."""
        before, after = self.before, self.after
        phases = {phase.value: _change_json(before.phases[phase], after.phases[phase]) for phase in self.common_phases}
        figures = {
            "difference_bytes": self.difference_bytes,
            "reserved_difference_bytes": after.reserved_bytes - before.reserved_bytes,
            "roles": {role.value: _change_json(before.roles[role], after.roles[role]) for role in Role},
            "phases": phases,
        }
        peaks = {"before": _peak_json(before), "after": _peak_json(after)}
        return document("diff", peaks, figures, select(self, "blocks=groups", "notes"))


def diff_peaks(before: PeakReport, after: PeakReport) -> PeakDiff:
    """Match the block groups of two peaks and subtract them.

    Groups must have the same role, module and layer; a replaced class keeps these. Within such a place
    they match by the file and function that allocated them, then by the function alone, without lines.
    Groups that remain under one module's name on both sides are one replaced part. If one of the peaks
    has no module names, layers and functions decide.
    """
    with_modules = all(any(block.module for block in report.blocks) for report in (before, after))
    pairs = [_by_place(report.blocks, with_modules=with_modules) for report in (before, after)]
    groups: list[GroupChange] = []
    for place in dict.fromkeys([*pairs[0], *pairs[1]]):
        # a module is one part even if other code allocates it, and so is a library's workspace
        one_part = bool(place.module) or place.role is Role.LIBRARY_WORKSPACE
        matched = _match(pairs[0].get(place, []), pairs[1].get(place, []), one_part=one_part)
        groups.extend(_change(place, of_before, of_after) for of_before, of_after in matched)
    groups.sort(key=lambda group: (-abs(group.difference_bytes), -max(group.before_bytes, group.after_bytes)))
    notes = tuple(_notes(before, after, with_modules=with_modules))
    return PeakDiff(before=before, after=after, groups=tuple(groups), notes=notes)


def _by_place(blocks: Iterable[BlockGroup], *, with_modules: bool) -> dict[Place, list[BlockGroup]]:
    places: dict[Place, list[BlockGroup]] = defaultdict(list)
    for block in blocks:
        module = block.module if with_modules else ""
        places[Place(role=block.role, module=module, layer=block.layer)].append(block)
    return places


Matched = tuple[list[BlockGroup], list[BlockGroup]]


def _match(left: list[BlockGroup], right: list[BlockGroup], *, one_part: bool) -> Iterator[Matched]:
    """Pair the groups of one place; each is in exactly one pair; one side of a pair may be empty."""
    # by file and function without the line, then by function
    for name in (lambda block: _LINE.sub(" ", block.frame), lambda block: block.frame.rpartition(" ")[2]):
        named = [_grouped(blocks, name) for blocks in (left, right)]
        shared = named[0].keys() & named[1].keys()
        for key in sorted(shared):
            yield named[0][key], named[1][key]
        left, right = ([block for key in each if key not in shared for block in each[key]] for each in named)
    if one_part and left and right:
        yield left, right
        return
    yield from (([block], []) for block in left)
    yield from (([], [block]) for block in right)


def _grouped(blocks: Iterable[BlockGroup], name: Callable[[BlockGroup], str]) -> dict[str, list[BlockGroup]]:
    named: dict[str, list[BlockGroup]] = defaultdict(list)
    for block in blocks:
        named[name(block)].append(block)
    return named


def _change(place: Place, before: Sequence[BlockGroup], after: Sequence[BlockGroup]) -> GroupChange:
    return GroupChange(
        place=place,
        before_bytes=sum(block.size_bytes for block in before),
        after_bytes=sum(block.size_bytes for block in after),
        before_count=sum(block.count for block in before),
        after_count=sum(block.count for block in after),
        frames_before=_frames(before),
        frames_after=_frames(after),
    )


def _frames(blocks: Sequence[BlockGroup]) -> tuple[str, ...]:
    largest_first = sorted(blocks, key=lambda block: -block.size_bytes)
    return tuple(dict.fromkeys(block.frame for block in largest_first if block.frame))


def _notes(before: PeakReport, after: PeakReport, *, with_modules: bool) -> Iterator[str]:
    for name, report in (("first", before), ("second", after)):
        if report.out_of_memory is not None and not report.out_of_memory.caught:
            yield f"{name} snapshot: memory ran out, so its peak is what was reached"
        yield from (f"{name} snapshot: {note}" for note in report.notes)
    named = any(block.module for report in (before, after) for block in report.blocks)
    if named and not with_modules:
        yield "only one of the snapshots has module names: blocks are matched by role, layer and function"


def _peak_json(report: PeakReport) -> dict[str, Any]:
    return select(report, "device", "peak_bytes", "reserved_bytes", "complete", "peak_phase")


def _change_json(before_bytes: int, after_bytes: int) -> dict[str, int]:
    difference_bytes = after_bytes - before_bytes
    return {"before_bytes": before_bytes, "after_bytes": after_bytes, "difference_bytes": difference_bytes}
