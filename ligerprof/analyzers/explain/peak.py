"""The report on a device's peak: what the memory belongs to, as printed and as JSON."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ligerprof.analyzers.attribution.blocks import Owner
from ligerprof.analyzers.explain.failure import FailedAllocation
from ligerprof.analyzers.explain.steps import Growth, PhasePeaks
from ligerprof.analyzers.explain.what_if import WhatIf
from ligerprof.roles import MemoryBreakdown, Phase, Role
from ligerprof.serialization import document, select


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockGroup:
    """Blocks at the peak that share role, module, frame, phase and layer.

    Attributes:
        size_bytes: requested bytes of all blocks.
        count: number of blocks.
        module: dotted module name, "" if unknown.
        frame: `file:line function` of the Python code that allocated them, or an autograd node's name, or "".
        layer: index of the decoder layer, None outside the layers.
    """

    role: Role
    size_bytes: int
    count: int
    module: str
    frame: str
    phase: Phase
    layer: int | None = None

    def to_json(self) -> dict[str, Any]:
        """An entry of `blocks` in the JSON."""
        return select(self, "role", "bytes=size_bytes", "count", "module", "frame", "phase", "layer")


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakReport:
    """What a device's memory at its peak belongs to.

    Attributes:
        peak_bytes: allocated bytes at the peak, as max_memory_allocated() counts them.
        reserved_bytes: the highest reserved bytes.
        complete: whether the recording starts with an empty device.
        roles: add up to `peak_bytes`, rounding included.
        blocks: largest first; their bytes add up to the roles without allocator_rounding.
        phases: the highest allocated bytes in each phase that ran.
        peak_phase: the phase that ran at the peak, None if unknown.
        notes: one sentence each.
        out_of_memory: the first allocation that did not fit.
        what_if: the lowest peak first.
    """

    device: int
    peak_bytes: int
    reserved_bytes: int
    complete: bool
    roles: MemoryBreakdown
    blocks: tuple[BlockGroup, ...]
    phases: Mapping[Phase, int] = field(default_factory=dict)
    peak_phase: Phase | None = None
    notes: tuple[str, ...] = ()
    steps: tuple[PhasePeaks, ...] = ()
    out_of_memory: FailedAllocation | None = None
    what_if: tuple[WhatIf, ...] = ()
    growth: Growth | None = None

    def to_json(self) -> dict[str, Any]:
        """The object of `ligerprof explain --json`."""
        return document(
            "peak",
            select(
                self, "device", "peak_bytes", "reserved_bytes", "complete", "peak_phase", "phases", "roles", "blocks"
            ),
            select(self, "notes", "steps", "oom=out_of_memory", "what_if", "growth"),
        )


def group_blocks(owners: Iterable[Owner]) -> tuple[BlockGroup, ...]:
    """Group the owners that differ only in their block, the largest group first."""
    grouped: dict[tuple[Role, str, str, Phase, int | None], list[Owner]] = defaultdict(list)
    for owner in owners:
        grouped[owner.role, owner.module, owner.frame, owner.phase, owner.layer].append(owner)
    groups = [
        BlockGroup(
            role=role,
            size_bytes=sum(owner.requested_bytes for owner in members),
            count=len(members),
            module=module,
            frame=frame,
            phase=phase,
            layer=layer,
        )
        for (role, module, frame, phase, layer), members in grouped.items()
    ]
    return tuple(sorted(groups, key=lambda group: -group.size_bytes))
