"""Run trials of a command on simulated GPUs, several at a time, and end each as soon as its verdict is known."""

import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ligerprof.errors import LigerprofError, MissingDependencyError
from ligerprof.files import write_new_file
from ligerprof.recipe.commands.changes import ChangedCommand
from ligerprof.runs.command_search.trunk import Branch, Trunk, can_branch
from ligerprof.runs.recording.launch import environment_of, ranked_command
from ligerprof.runs.recording.settings import Mode, Settings, SimulatedGpu, Steps
from ligerprof.runs.recording.summary import PREFIX, RecordingSummary, read_summary
from ligerprof.simulated_gpu.files import leaving_nothing
from ligerprof.simulated_gpu.ranks.world import World
from ligerprof.snapshots.watch import available_bytes
from ligerprof.text import printable
from ligerprof.words import Word

# of a limit that nothing reaches
UNLIMITED_BYTES = 2**44
_POLL_SECONDS = 0.05
# of a program that was told to end, and of one that is asked how far it came
_LAST_LINES = 40
_LOG = "output.txt"


class Outcome(Word):
    """How a trial ended: its steps ran, memory ran out, or the program failed for another reason."""

    RAN = "ran"
    OUT_OF_MEMORY = "out of memory"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPeak:
    """What one rank of a trial held at most, in bytes."""

    rank: int
    peak_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One simulated run of a command.

    Attributes:
        limit_bytes: limit on reserved memory; None: there was none.
        peak_bytes, reserved_bytes: highest memory of the worst rank; 0 if memory ran out.
        reason: why the program failed, or an empty text.
        step_seconds: the predicted time of its last step on the GPU, if it was wanted and is known.
        ranks: those that ran, the worst first; if memory ran out, those for which it did.
    """

    command: ChangedCommand
    limit_bytes: int | None
    outcome: Outcome
    seconds: float
    steps: int = 0
    peak_bytes: int = 0
    reserved_bytes: int = 0
    reason: str = ""
    step_seconds: float | None = None
    time_bound: str | None = None
    ranks: tuple[RankPeak, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Where trials run.

    Attributes:
        gpu: the GPU, whose limit is that of the trial.
        world: number of ranks; None: what the command says.
        branches: whether trials go on from where one process of the command reads its arguments.
    """

    folder: Path
    gpu: SimulatedGpu
    steps: Steps
    at_once: int
    world: int | None = None
    branches: bool = True


# starts a command with an environment, and its output in a file
_Start = Callable[[Sequence[str], Mapping[str, str], Path], "subprocess.Popen[bytes] | Branch"]


class _Running:
    """A trial that runs."""

    def __init__(
        self, key: Hashable, command: ChangedCommand, machine: Machine, limit_bytes: int | None, start: "_Start"
    ) -> None:
        self.key, self.limit_bytes, self._command = key, limit_bytes, command
        self.began = time.monotonic()
        self.was_alone = True
        self._folder = machine.folder
        self._folder.mkdir(parents=True)
        self._stack = ExitStack()
        settings = _settings(machine, UNLIMITED_BYTES if limit_bytes is None else limit_bytes)
        messages = self._folder / "ranks"
        messages.mkdir()
        world = World(size=machine.world, folder=messages)
        variables = {**environment_of(settings), **world.to_environment(), **command.environment}
        for path, text in command.files.items():
            write_new_file(path, text, force=False)
        self._stack.enter_context(leaving_nothing(self._folder))
        try:
            self._process = start(ranked_command(command.words, machine.world), variables, self._folder / _LOG)
        except BaseException:
            self._stack.close()
            raise

    def poll(self) -> Trial | None:
        """The trial if its verdict is known; its processes have ended then."""
        status = self._process.poll()
        if status is None and not any(each.out_of_memory for each in self._summaries()):
            return None
        self.stop()
        # what the processes wrote last
        found = self._summaries()
        is_over = any(each.out_of_memory for each in found)
        begun = partial(
            Trial,
            command=self._command,
            limit_bytes=self.limit_bytes,
            seconds=time.monotonic() - self.began,
            steps=max((each.steps for each in found), default=0),
            ranks=_worst_first(each for each in found if each.steps and each.out_of_memory is is_over),
        )
        if is_over:
            return begun(outcome=Outcome.OUT_OF_MEMORY)
        if status or not any(each.steps for each in found):
            return begun(outcome=Outcome.FAILED, reason=self._reason(status))
        return begun(
            outcome=Outcome.RAN,
            peak_bytes=max(each.counter_peak_bytes for each in found),
            reserved_bytes=max(each.counter_reserved_bytes for each in found),
            **_slowest(found),
        )

    def stop(self) -> None:
        """End its processes, and remove what they left."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._stack.close()

    def _summaries(self) -> list[RecordingSummary]:
        found = []
        for folder in self._folder.glob(f"{PREFIX}*"):
            # not written yet, or by a process that only looked at the device
            with suppress(LigerprofError):
                found.append(read_summary(folder))
        return found

    def _reason(self, status: int | None) -> str:
        with (self._folder / _LOG).open(errors="replace") as log:
            lines = [line.strip() for line in deque(log, _LAST_LINES) if line.strip()]
        told = [line for line in lines if "rror" in line or line.startswith("ligerprof: ")]
        if status == 0:
            return "it ended without an optimizer step"
        return printable((told or lines or [f"exit code {status}"])[-1])[:300]


def _settings(machine: Machine, limit_bytes: int) -> Settings:
    gpu = replace(machine.gpu, limit_bytes=limit_bytes)
    return Settings(mode=Mode.RUN, output=machine.folder, steps=machine.steps, simulated=gpu)


def _worst_first(found: Iterable[RecordingSummary]) -> tuple[RankPeak, ...]:
    ranks = (
        RankPeak(rank=each.rank or 0, peak_bytes=each.counter_peak_bytes, reserved_bytes=each.counter_reserved_bytes)
        for each in found
    )
    return tuple(sorted(ranks, key=lambda each: (-each.reserved_bytes, each.rank)))


def _slowest(found: Sequence[RecordingSummary]) -> dict[str, Any]:
    """The time of the rank whose step takes longest."""
    times = [each.simulated for each in found if each.simulated and "step_seconds" in each.simulated]
    slowest = max(times, key=lambda each: float(each["step_seconds"]), default={})
    return {key: slowest[key] for key in ("step_seconds", "time_bound") if key in slowest}


class Trials:
    """Runs trials of changed commands, and tells how each has ended.

    Args:
        command: the command of a key, whose files are in the folder that it is given.
        tell: receives each trial when it has ended.
        begin: receives the key of each trial when it begins.
    """

    def __init__(
        self,
        machine: Machine,
        command: Callable[[Hashable, Path], ChangedCommand],
        tell: Callable[[Hashable, Trial], None] = lambda _key, _trial: None,
        begin: Callable[[Hashable], None] = lambda _key: None,
    ) -> None:
        self._machine, self._command, self._tell, self._begin = machine, command, tell, begin
        self._running: list[_Running] = []
        self._trunk: Trunk | None = None
        self._branches = machine.branches and machine.world is None
        self._number = 0
        self._again: set[Hashable] = set()

    def advance(
        self,
        wanted: Sequence[tuple[Any, int | None]],
        is_open: Callable[[Any, int | None], bool] = lambda _key, _limit_bytes: True,
    ) -> None:
        """Run trials until one more has ended.

        Args:
            wanted: the key and the limit of each trial, the most useful first.
            is_open: whether a trial that runs can still say something; if not, it is ended.
        """
        for running in [each for each in self._running if not is_open(each.key, each.limit_bytes)]:
            self._end(running)
        while True:
            now = {running.key for running in self._running}
            for key, limit_bytes in wanted:
                if key not in now and len(self._running) < self._most():
                    self._start(key, limit_bytes)
            for running in list(self._running):
                trial = running.poll()
                if trial is not None:
                    self._running.remove(running)
                    if trial.outcome is Outcome.FAILED and not running.was_alone and running.key not in self._again:
                        # perhaps because of another trial: a port, or a file of a cache that went
                        self._again.add(running.key)
                        break
                    self._tell(running.key, trial)
                    return
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        for running in list(self._running):
            self._end(running)
        if self._trunk is not None:
            self._trunk.stop()
            self._trunk = None

    def _most(self) -> int:
        """Trials at a time; one that has failed beside others is repeated alone."""
        alone = any(running.key in self._again for running in self._running)
        return 1 if alone else self._machine.at_once

    def _start(self, key: Hashable, limit_bytes: int | None) -> None:
        if key in self._again and self._running:
            return
        self._number += 1
        folder = self._machine.folder / f"{self._number:03d}"
        self._begin(key)
        machine = replace(self._machine, folder=folder, at_once=1)
        running = _Running(key, self._command(key, folder), machine, limit_bytes, self._process)
        running.was_alone = not self._running
        for other in self._running:
            other.was_alone = False
        self._running.append(running)

    def _process(
        self, words: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> "subprocess.Popen[bytes] | Branch":
        """Start a trial: from where the command reads its arguments if it can, else as a whole."""
        try:
            if self._branches and not self._again and can_branch(words):
                if self._trunk is None:
                    folder = self._machine.folder / "trunk"
                    folder.mkdir()
                    own = replace(_settings(self._machine, UNLIMITED_BYTES), output=folder).to_environment()
                    self._trunk = Trunk(words, {**environment, **own}, folder)
                branch = self._trunk.branch(words, environment, log)
                if branch is not None:
                    return branch
            with log.open("wb") as output:
                return subprocess.Popen(
                    words,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    # signals of the terminal are for this process, which ends the trial
                    start_new_session=True,
                )
        except OSError as error:
            raise MissingDependencyError(
                f"{words[0]}: cannot be started ({error.strerror}). Is it on the path?"
            ) from None

    def _end(self, running: _Running) -> None:
        running.stop()
        self._running.remove(running)


# a program that trains with TRL takes .6 to 1.3 GB
_TRIAL_BYTES, _MOST_AT_ONCE = 2 * 10**9, 8


def trials_at_once() -> int:
    """How many trials run at a time: as many as there are cores and main memory for, at most eight."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(cores, available_bytes() / _TRIAL_BYTES, _MOST_AT_ONCE)))
