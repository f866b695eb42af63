"""The result of one profiled step, measured or simulated."""

import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ligerprof.recipe.categories import Engine
from ligerprof.roles import Backend, Phase
from ligerprof.serialization import select
from ligerprof.text import Printed


def package_versions() -> dict[str, str]:
    """The versions of Python and of each installed package that a step may run."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "triton", "transformers", "peft", "liger_kernel", "deepspeed"):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


# callback that receives a short status message
Progress = Callable[[str], None]


def silent(_text: str) -> None:
    """Progress that is not reported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfMemory:
    """The allocation that did not fit, and the state at that moment.

    Attributes:
        requested_bytes: size of the allocation; None if unknown.
        step: the training step, from 1; 0 during the build.
    """

    requested_bytes: int | None
    allocated_bytes: int
    reserved_bytes: int
    limit_bytes: int
    phase: Phase
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OutsideMoment:
    """Memory of the GPU at one moment.

    Attributes:
        moment: what has just ended: context, process_group, model, a phase of the first step, warm_up or step.
        outside_bytes: in use by CUDA's count (cudaMemGetInfo), less `reserved_bytes`.
        process_bytes: of this process as nvidia-smi lists it; None if the driver does not say.
    """

    moment: str
    outside_bytes: int
    reserved_bytes: int
    process_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class OutsideMemory:
    """What a step needs of a GPU besides torch's allocator: context, kernels, NCCL and other processes.

    Attributes:
        other_processes_bytes: in use by NVML's count before this process had a context; None if not known.
        driver_bytes: what the driver keeps, and CUDA does not count as memory of the GPU; None if not known.
    """

    moments: tuple[OutsideMoment, ...]
    other_processes_bytes: int | None
    driver_bytes: int | None

    @property
    def outside_bytes(self) -> int | None:
        """What the last moment found; None without moments."""
        return self.moments[-1].outside_bytes if self.moments else None

    def to_json(self) -> dict[str, Any]:
        """The object `outside` of result.json: each moment with what has been added since the one before."""
        before = [self.other_processes_bytes or 0, *(each.outside_bytes for each in self.moments)]
        moments = [
            {
                **select(each, "moment", "outside_bytes"),
                "added_bytes": each.outside_bytes - earlier,
                **select(each, "reserved_bytes", "process_bytes"),
            }
            for each, earlier in zip(self.moments, before, strict=False)
        ]
        return {**select(self, "outside_bytes", "other_processes_bytes", "driver_bytes"), "moments": moments}


def figures_of(steps: Sequence[Any], last: Any, engine: Engine) -> dict[str, Any]:
    """The fields of an outcome that follow from the StepFigures of its steps, of which `last` is reported."""
    # DDP builds its buckets anew in the second step
    second = steps[1] if engine is Engine.DDP and len(steps) > 1 else None
    first = steps[0] if steps else last
    return {
        "first_step_peak_bytes": first.peak_bytes,
        "first_step_reserved_bytes": first.reserved_bytes,
        "second_step_peak_bytes": None if second is None else second.peak_bytes,
        "second_step_reserved_bytes": None if second is None else second.reserved_bytes,
        "phases": last.phases,
        "after_phase": last.after_phase,
        "evaluation_reserved_bytes": last.evaluation_reserved_bytes,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome(Printed):
    """One steady-state step (the second or a later one) and the first step.

    Attributes:
        peak_bytes: max_memory_allocated over the steady step, counted from an empty device; if `oom` is set, over
            the whole run.
        phases: peak bytes of forward, backward and optimizer, and of an evaluation after the step.
        after_phase: allocated bytes at the end of each phase.
        evaluation_reserved_bytes: reserved bytes at the peak of an evaluation; None without one.
        profiled_step: number of the steady step in the snapshot's stamps.
        snapshot: torch's snapshot dict (`segments`, `device_traces`, …) of build and all recorded steps.
        step_seconds: one entry per timed repetition; empty if simulated.
        notes: remarks for the reader, one sentence each.
        host_bytes: main memory that the step holds if it offloads to main memory, else None.
        ranks: outcomes by rank if several trained together; this outcome is then that of the rank with the
            highest peak.
        outside: memory outside torch's allocator; None if simulated.
        second_step_peak_bytes: of the second step under ddp, which builds its buckets anew there; else None.
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
    snapshot: dict[str, Any] = field(repr=False)
    evaluation_reserved_bytes: int | None = None
    step_seconds: tuple[float, ...] = ()
    oom: OutOfMemory | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    host_bytes: int | None = None
    ranks: Mapping[int, "StepOutcome"] = field(default_factory=dict)
    second_step_peak_bytes: int | None = None
    second_step_reserved_bytes: int | None = None
    outside: OutsideMemory | None = None

    @property
    def highest_reserved_bytes(self) -> int:
        """The most that was reserved in any step and in an evaluation."""
        others = (self.second_step_reserved_bytes or 0, self.evaluation_reserved_bytes or 0)
        return max(self.reserved_bytes, self.first_step_reserved_bytes, *others)
