"""recording.json: what a recorded process says about itself, next to its snapshot."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from ligerprof.analyzers.explain.ranks import ModuleWeights
from ligerprof.errors import LigerprofError, RunDirectoryError
from ligerprof.files import FileKind, read_json
from ligerprof.gpus import find_gpu
from ligerprof.runs.recording.settings import Steps

RECORDING = "recording.json"
# of the folder of a process, which is named after its rank when the command has ended
PREFIX = "process-"
_KIND = FileKind(error=RunDirectoryError, hint="Record the command again.")
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "LOCAL_RANK", "SLURM_LOCALID")


class RecordingState(str, Enum):
    """How far a recording has come."""

    RECORDING = "recording"
    WRITTEN = "written"
    LOST = "lost"


@dataclass(frozen=True, kw_only=True, slots=True)
class LatePeak:
    """A peak in a step without events.

    Attributes:
        step: the last step that may have reached it.
        first_step: the first one; 0: the same.
    """

    peak_bytes: int
    step: int
    first_step: int = 0

    @property
    def steps(self) -> Steps:
        """The steps one of which reached it."""
        return Steps(first=self.first_step or self.step, last=self.step)


@dataclass(frozen=True, kw_only=True, slots=True)
class LateFailure:
    """An allocation that failed after the recorded steps."""

    requested_bytes: int
    allocated_bytes: int
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordingSummary:
    """One recorded process.

    Attributes:
        rank: None for a process that no launcher numbered.
        steps: the number of steps that it ran, those that were not recorded included.
        last_recorded: the last step with events; None if all of them have.
        counter_peak_bytes: torch.cuda.max_memory_allocated() when the snapshot was written.
        counter_reserved_bytes: torch.cuda.max_memory_reserved() then.
        main_memory_bytes: the most main memory of the process; 0 where it is not known.
        pinned_bytes: page-locked memory of torch's host allocator at its highest.
        out_of_memory: whether an allocation failed.
        simulated: what a simulated GPU made up and left out; None on a real one.
        weights: this rank's parts of the modules that were trained, by name with `*` for each index.
        models: `name`, `role`, `parameters_bytes`, `trainable_bytes`, `dtypes` and `phases` of each model that ran.
        notes: one sentence each, without a full stop.
    """

    pid: int
    started_us: int
    argv: tuple[str, ...]
    rank: int | None = None
    state: RecordingState = RecordingState.RECORDING
    steps: int = 0
    last_recorded: int | None = None
    counter_peak_bytes: int = 0
    counter_reserved_bytes: int = 0
    main_memory_bytes: int = 0
    pinned_bytes: int = 0
    out_of_memory: bool = False
    late_peak: LatePeak | None = None
    late_failure: LateFailure | None = None
    simulated: Mapping[str, Any] | None = None
    weights: Mapping[str, ModuleWeights] = field(default_factory=dict)
    models: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    schema: int = field(default=1)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "RecordingSummary":
        """Read the content of recording.json; raises TypeError, ValueError or KeyError if it is not one."""
        late_peak, late_failure = values.get("late_peak"), values.get("late_failure")
        return cls(
            **{
                **values,
                "argv": tuple(map(str, values["argv"])),
                "notes": tuple(map(str, values["notes"])),
                "state": RecordingState(values["state"]),
                "weights": {
                    str(name): ModuleWeights(int(count), int(size_bytes))
                    for name, (count, size_bytes) in values.get("weights", {}).items()
                },
                "models": tuple(map(dict, values.get("models", ()))),
                "late_peak": LatePeak(**late_peak) if late_peak else None,
                "late_failure": LateFailure(**late_failure) if late_failure else None,
            }
        )


def read_summary(folder: Path) -> RecordingSummary:
    """Read recording.json of a folder; raises RunDirectoryError if it is missing or damaged."""
    values = read_json(folder / RECORDING, _KIND)
    try:
        return RecordingSummary.from_json(values)
    except (TypeError, ValueError, KeyError):
        raise RunDirectoryError(f"{folder / RECORDING}: not what a recorder writes. {_KIND.hint}") from None


def recorded_weights(snapshot: Path) -> Mapping[str, ModuleWeights]:
    """The weights by module of the rank whose snapshot this is; {} for a snapshot that `run` did not record."""
    try:
        return read_summary(snapshot.parent).weights
    except LigerprofError:
        return {}


def simulated_gpu(recording: Path) -> str | None:
    """The GPU for which a run directory, or the recording in one, was simulated, as a text; None if it was measured."""
    folder = recording if recording.is_dir() else recording.parent
    if str(recording) == "-" or not (folder / RECORDING).is_file():
        return None
    try:
        simulated = read_summary(folder).simulated
        return find_gpu(str(simulated["gpu"])).title if simulated else None
    except (LigerprofError, TypeError, KeyError):
        return None


def current_rank() -> int | None:
    """The rank of this process: by torch.distributed once it runs, else by its launcher; None without one."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return next((int(os.environ[name]) for name in _RANKS if os.environ.get(name, "").isdecimal()), None)
