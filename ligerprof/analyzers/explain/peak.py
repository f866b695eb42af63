"""The report on a device's peak: what the memory belongs to, as printed and as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ligerprof.analyzers.explain.groups import BlockGroup, join_layers
from ligerprof.analyzers.explain.growth import Growth
from ligerprof.analyzers.explain.steps import PhasePeaks
from ligerprof.analyzers.suggestions.suggestion import Suggestion
from ligerprof.roles import MemoryBreakdown, Phase
from ligerprof.serialization import JsonKeys, document, select

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
