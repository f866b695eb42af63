"""What an engine brings back from one profiled step, measured or simulated alike."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ligerprof.roles import Backend, Phase

# told in a few words what an engine does next
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfMemory:
    """The allocation that did not fit.

    Attributes:
        requested_bytes: what was asked for, None where the driver did not say.
        allocated_bytes: what blocks held at that moment.
        reserved_bytes: what segments held at that moment.
        limit_bytes: the limit on reserved bytes.
        phase: what was running.
        step: which training step, from 1; 0 while building.
    """

    requested_bytes: int | None
    allocated_bytes: int
    reserved_bytes: int
    limit_bytes: int
    phase: Phase
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """One steady-state step (the second and later) and the first one beside it.

    Attributes:
        backend: whether a GPU measured this or the simulator computed it.
        peak_bytes: max_memory_allocated over the steady step, from an empty device; over
            whatever ran where `oom` is set.
        phases: the highest allocated bytes within forward, backward and optimizer of that step.
        after_phase: allocated bytes when each of them ended.
        step_seconds: one entry a timed repetition, none when simulated.
        profiled_step: number of the steady step in the snapshot's stamps.
        snapshot: torch's snapshot dict (`segments`, `device_traces`, …) of build and all recorded steps.
        gpu: the GPU measured, or the one the simulation stands for.
        versions: package name to version, as imported.
        notes: what a reader should know, one sentence each.
        host_bytes: main memory that the step holds, where the engine keeps something there, else None.
        ranks: every rank's own outcome where several trained together, by rank; the outcome itself is
            then the one of the rank with the highest peak.
    """

    backend: Backend
    gpu: str
    peak_bytes: int
    reserved_bytes: int
    first_step_peak_bytes: int
    first_step_reserved_bytes: int
    phases: Mapping[Phase, int]
    after_phase: Mapping[Phase, int]
    profiled_step: int
    snapshot: dict[str, Any]
    step_seconds: tuple[float, ...] = ()
    oom: OutOfMemory | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    host_bytes: int | None = None
    ranks: Mapping[int, "StepOutcome"] = field(default_factory=dict)
