"""Settings in the environment of a recorded process, from `ligerprof run` or LIGERPROF=oom, and its messages."""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from ligerprof.errors import RecipeError
from ligerprof.text import printable

VARIABLE = "LIGERPROF"
# an empty file among the recordings: a process has imported torch
IMPORTED = "torch-imported"
_OUTPUT, _STEPS, _DISK = "LIGERPROF_OUTPUT", "LIGERPROF_STEPS", "LIGERPROF_DISK"
# the most bytes on disk that a recording of any length takes while it runs
DISK_BYTES = 4 * 10**9
_GPU = "LIGERPROF_SIMULATED_GPU"
# recipe/routing.py's, which a process does not load until it needs it
DEFAULT_ROUTING = "uniform"


def say(text: str) -> None:
    """Print one line to stderr, if there is one, which the process shares with the program."""
    if sys.stderr is not None:
        print(f"ligerprof: {printable(text)}", file=sys.stderr, flush=True)  # noqa: T201 - no click in this process


class Mode(str, Enum):
    """What is recorded: a run with phases and modules, or the stacks of what is held when memory runs out."""

    RUN = "run"
    OUT_OF_MEMORY = "oom"


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """The training steps to record in full, both ends included; `last` None: all from `first` on."""

    first: int = 1
    last: int | None = None

    def __str__(self) -> str:
        if self.first == self.last:
            return str(self.first)
        return f"{self.first}:{'' if self.last is None else self.last}"

    @classmethod
    def parse(cls, text: str) -> "Steps":
        """Read `2:4`, `2:`, `:4` or `3`; raises RecipeError for anything else than steps, counted from 1."""
        first, colon, last = text.partition(":")
        try:
            steps = cls(first=int(first or 1), last=int(last) if last else None if colon else int(first))
        except ValueError:
            steps = cls(first=0)
        if steps.first < 1 or (steps.last is not None and steps.last < steps.first):
            raise RecipeError(f"{text!r}: not steps. Give the first and the last, such as 2:4, or one, such as 3.")
        return steps


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedGpu:
    """The GPU that a process has in simulation.

    Attributes:
        limit_bytes: limit on reserved memory; None: what torch gets of the GPU's.
        eager: whether functions of torch.compile run without it.
        routing: how tokens choose experts, as `recipe/routing.py` stores it.
        times: whether the time of a step is predicted.
        flash_attn: whether flash-attn has a stand-in where it is not installed.
    """

    gpu: str
    limit_bytes: int | None = None
    eager: bool = False
    routing: str = DEFAULT_ROUTING
    times: bool = False
    flash_attn: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What a process records, and where.

    Attributes:
        output: the folder for the files of all processes; None: a new one under runs/, when memory runs out.
        disk_bytes: the most bytes of files while the process runs.
        simulated: the GPU on which it runs without one, or None.
    """

    mode: Mode
    output: Path | None = None
    steps: Steps = Steps()
    disk_bytes: int = DISK_BYTES
    simulated: SimulatedGpu | None = None

    def to_environment(self) -> dict[str, str]:
        output = {} if self.output is None else {_OUTPUT: str(self.output.absolute())}
        simulated = {} if self.simulated is None else {_GPU: json.dumps(asdict(self.simulated))}
        numbers = {_STEPS: str(self.steps), _DISK: str(self.disk_bytes)}
        return {VARIABLE: self.mode.value, **numbers, **output, **simulated}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Settings | None":
        """Read the variables; None if nothing is to be recorded.

        Raises:
            RecipeError: a variable has another value than these.
        """
        word = environment.get(VARIABLE, "")
        if not word:
            return None
        try:
            mode = Mode(word)
        except ValueError:
            raise RecipeError(
                f"{VARIABLE}={word}: unknown. Set it to {Mode.OUT_OF_MEMORY.value}, or unset it."
            ) from None
        output, steps, disk, gpu = (environment.get(name, "") for name in (_OUTPUT, _STEPS, _DISK, _GPU))
        if mode is Mode.RUN and not output:
            raise RecipeError(f"{VARIABLE}={word}: only `ligerprof run` sets this.")
        return cls(
            mode=mode,
            output=Path(output) if output else None,
            steps=Steps.parse(steps) if steps else Steps(),
            disk_bytes=int(disk) if disk.isdecimal() else DISK_BYTES,
            simulated=SimulatedGpu(**json.loads(gpu)) if gpu else None,
        )
