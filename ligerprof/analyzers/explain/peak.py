"""The report on a device's peak: what the memory belongs to, as printed, as JSON, and read back from it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ligerprof.analyzers.explain.groups import BlockGroup, join_layers
from ligerprof.analyzers.explain.growth import Growth
from ligerprof.analyzers.explain.steps import PhasePeaks
from ligerprof.analyzers.result_reader import ResultReader
from ligerprof.analyzers.suggestions.suggestion import Suggestion
from ligerprof.errors import ResultFormatError
from ligerprof.roles import Backend, MemoryBreakdown, Phase, Role
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
        return document(
            "peak",
            select(
                self, "device", "peak_bytes", "reserved_bytes", "complete", "peak_phase", "phases", "roles", "blocks"
            ),
            select(self, "rows"),
            select(self, "notes", "steps", "oom=out_of_memory", "suggestions"),
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
