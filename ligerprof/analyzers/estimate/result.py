"""What an estimate says: the peak, its phases and roles, the headline terms, what was assumed and what is missing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ligerprof.analyzers.estimate.places import PlaceBytes
from ligerprof.roles import MemoryBreakdown, Phase
from ligerprof.serialization import document, select


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """One headline quantity as a formula and its value.

    Attributes:
        name: what it is, such as `checkpoints`.
        formula: how it follows from the recipe, such as `B T H L 4`.
    """

    name: str
    formula: str
    size_bytes: int

    def to_json(self) -> dict[str, Any]:
        """An entry of `terms` in the estimate's JSON."""
        return select(self, "name", "formula", "bytes=size_bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """The estimated memory of a training step on one GPU.

    Attributes:
        peak_bytes: what max_memory_allocated would report for the steady step, from an empty device.
        peak_phase: the phase that has the peak.
        phases: the highest bytes of forward, backward and optimizer.
        static_bytes: weights, gradients and optimizer states: parameters times a few bytes.
        checkpoint_bytes: the inputs of all decoder layers, 0 without checkpointing.
        logits_bytes: the highest sum of all [T, V] logits tensors; 0 with a loss that makes none.
        roles: who holds the peak; adds up to `peak_bytes`.
        layers: the same by part of the model, from the input on.
        lowest_bytes, highest_bytes: what the peak lies between, depending on which large blocks the allocator does
            not split: it leaves remainders of up to 1 MiB in them.
        first_step_peak_bytes: the first step's peak: it finds no optimizer states.
        host_bytes: main memory that training takes in this GPU's process with offload, else 0.
        terms: the headline quantities as formulas.
        assumed: what the figures rest on, one sentence each.
        left_out: what they do not hold, one sentence each.
    """

    peak_bytes: int
    peak_phase: Phase
    phases: Mapping[Phase, int]
    static_bytes: int
    checkpoint_bytes: int
    logits_bytes: int
    roles: MemoryBreakdown
    layers: tuple[PlaceBytes, ...]
    lowest_bytes: int
    highest_bytes: int
    first_step_peak_bytes: int
    host_bytes: int
    terms: tuple[Term, ...]
    assumed: tuple[str, ...]
    left_out: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The object of `ligerprof estimate --json`."""
        return document(
            "estimate",
            select(self, "peak_bytes", "peak_phase", "phases", "static_bytes", "checkpoint_bytes", "logits_bytes"),
            select(self, "roles", "layers", "lowest_bytes", "highest_bytes", "first_step_peak_bytes", "host_bytes"),
            select(self, "terms", "assumed", "left_out"),
        )
