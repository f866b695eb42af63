"""The answer to "who holds the peak?": what every reader of a snapshot gets and every report prints."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ligerprof.analyzers.explain.parts import Answers
from ligerprof.roles import MemoryBreakdown, Phase, Role


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockGroup:
    """Blocks alive at the peak that share role, module and frame.

    Attributes:
        size_bytes: requested bytes of all of them.
        count: how many blocks.
        module: dotted module name, "" where unknown.
        frame: `file:line function` of the Python code that asked, or an autograd node's name, or "".
        phase: when they were asked for.
        layer: index of the decoder layer, None outside of layers.
    """

    role: Role
    size_bytes: int
    count: int
    module: str
    frame: str
    phase: Phase
    layer: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakReport:
    """Who held a device's memory at its peak.

    Attributes:
        peak_bytes: allocated bytes at the peak, as max_memory_allocated counts them.
        reserved_bytes: the highest reserved bytes of the window.
        complete: whether the recording reaches back to an empty device.
        roles: adds up to `peak_bytes`, rounding included.
        blocks: largest first; their bytes add up to the roles without allocator_rounding.
        phases: the highest allocated bytes while each phase ran; phases that never ran are absent.
        peak_phase: the phase that ran at the peak, None where it cannot be told.
        notes: what a reader should know, one sentence each.
        answers: each step's phases, why memory ran out, what would help, what grows.
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
    answers: Answers = field(default_factory=Answers)

    def to_json(self) -> dict[str, Any]:
        """The object of `ligerprof explain --json`."""
        return {
            "schema": 1,
            "kind": "peak",
            "device": self.device,
            "peak_bytes": self.peak_bytes,
            "reserved_bytes": self.reserved_bytes,
            "complete": self.complete,
            "peak_phase": self.peak_phase.value if self.peak_phase else None,
            "phases": {phase.value: size_bytes for phase, size_bytes in self.phases.items()},
            "roles": self.roles.to_json(),
            "blocks": [
                {
                    "role": block.role.value,
                    "bytes": block.size_bytes,
                    "count": block.count,
                    "module": block.module,
                    "frame": block.frame,
                    "phase": block.phase.value,
                    "layer": block.layer,
                }
                for block in self.blocks
            ],
            "notes": list(self.notes),
            **self.answers.to_json(),
        }
