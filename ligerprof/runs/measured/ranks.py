"""Training on several GPUs: launch one process per rank, measure in each, merge the outcomes."""

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from ligerprof.errors import LigerprofError, MissingDependencyError, RecipeError
from ligerprof.recipe.categories import Engine
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.measured.deepspeed import deepspeed_trainer, require_deepspeed
from ligerprof.runs.measured.step import Build, Join, measure_step
from ligerprof.runs.outcome import Progress, StepOutcome
from ligerprof.runs.parallel import TRAINERS, join_process_group


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """One process of a group that a launcher such as torchrun started; `local` is the index of its GPU."""

    rank: int
    world_size: int
    local: int


def rank_from_environment(variables: Mapping[str, str] = os.environ) -> Rank | None:
    """Read the variables that torchrun, DeepSpeed's launcher and others set; None without a launcher.

    Raises:
        RecipeError: a variable is missing or not a number.
    """
    if "RANK" not in variables and "WORLD_SIZE" not in variables:
        return None
    required = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in required if name not in variables]:
        raise RecipeError(f"RANK and WORLD_SIZE go with {', '.join(missing)}, which the environment lacks.")
    try:
        rank, world_size = int(variables["RANK"]), int(variables["WORLD_SIZE"])
        return Rank(rank=rank, world_size=world_size, local=int(variables.get("LOCAL_RANK", "0")))
    except ValueError as error:
        raise RecipeError(
            f"RANK, WORLD_SIZE and LOCAL_RANK are numbers ({error}). Unset them, or use torchrun."
        ) from None


def merge_ranks(outcomes: Mapping[int, StepOutcome]) -> StepOutcome:
    """The outcome of the worst rank, with those of all ranks in `ranks`, the worst first.

    The worst rank is one that ran out of memory, else the one with the highest peak. The slowest rank gives the
    time of each step.
    """
    worst_first = sorted(outcomes, key=lambda rank: (outcomes[rank].oom is None, -outcomes[rank].peak_bytes, rank))
    worst = worst_first[0]
    timings = [outcome.step_seconds for outcome in outcomes.values() if outcome.step_seconds]
    notes = dict.fromkeys(note for outcome in outcomes.values() for note in outcome.notes)
    return dataclasses.replace(
        outcomes[worst],
        step_seconds=tuple(max(seconds) for seconds in zip(*timings, strict=False)),
        notes=(_worst_note(worst, outcomes), *notes),
        ranks={rank: outcomes[rank] for rank in worst_first},
    )


def _worst_note(worst: int, outcomes: Mapping[int, StepOutcome]) -> str:
    if outcomes[worst].oom is not None:
        return f"rank {worst} ran out of memory; the peak, the roles and the phases are its own"
    return f"the peak, the roles and the phases are rank {worst}'s, the highest of {len(outcomes)}"


# the function that each rank runs; pickled and sent to the rank's process
Work = Callable[[Progress], StepOutcome]

# how long other ranks can still report after one has failed: they usually run out of memory at the same place
_GRACE_SECONDS = 10.0
_END_SECONDS = 5.0


def local_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The variables that torch.distributed and DeepSpeed read, for a rank of a group on this machine."""
    ranks = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size))
    return {**ranks, **sizes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def run_ranks(work: Work, world_size: int, logs: Path, progress: Progress) -> dict[int, StepOutcome]:
    """Run `work` once per rank, each in its own process.

    Args:
        logs: the folder for the output of each rank K, tracebacks included: rank-K.log.
        progress: callback that receives the status messages of rank 0.

    Returns:
        The outcomes by rank; if one ran out of memory, only those of the ranks that still reported.

    Raises:
        LigerprofError: a rank refused the recipe or died; the others were ended.
    """
    group = _Group(work, world_size, logs, progress)
    try:
        return group.outcomes()
    finally:
        group.end()


class _Group:
    """The ranks of one run and their messages."""

    def __init__(self, work: Work, world_size: int, logs: Path, progress: Progress) -> None:
        self._logs, self._progress = logs, progress
        self._found: dict[int, StepOutcome] = {}
        self._failures: list[LigerprofError] = []
        self._processes: dict[int, Any] = {}
        self._open: dict[Connection, int] = {}
        # a forked process cannot use CUDA where its parent did
        context = multiprocessing.get_context("spawn")
        port = free_port()
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            settings = local_environment(rank, world_size, port)
            process = context.Process(target=_be_rank, args=(work, settings, theirs, _log(logs, rank)), daemon=True)
            process.start()
            # only the rank keeps this end open: when it dies, our end reads EOF
            theirs.close()
            self._processes[rank], self._open[ours] = process, rank

    def outcomes(self) -> dict[int, StepOutcome]:
        """Wait for all ranks, or until the grace period after a failure is over."""
        deadline: float | None = None
        while self._open:
            if deadline is None and self._failed:
                deadline = time.monotonic() + _GRACE_SECONDS
            ready = wait(list(self._open), None if deadline is None else deadline - time.monotonic())
            for connection in ready:
                if isinstance(connection, Connection):
                    self._receive(connection)
            if deadline is not None and time.monotonic() >= deadline:
                break
        if self._failures and not self._out_of_memory:
            raise self._failures[0]
        return dict(sorted(self._found.items()))

    @property
    def _out_of_memory(self) -> bool:
        return any(outcome.oom is not None for outcome in self._found.values())

    @property
    def _failed(self) -> bool:
        return bool(self._failures) or self._out_of_memory

    def _receive(self, connection: Connection) -> None:
        rank = self._open[connection]
        message: StepOutcome | LigerprofError | str
        try:
            message = connection.recv()
        except EOFError:
            message = self._death(rank)
        if isinstance(message, str):
            if rank == 0:
                self._progress(message)
            return
        del self._open[connection]
        if isinstance(message, StepOutcome):
            self._found[rank] = message
        else:
            self._failures.append(message)

    def _death(self, rank: int) -> LigerprofError:
        process = self._processes[rank]
        process.join(_END_SECONDS)
        how = f"ended with exit code {process.exitcode}"
        if process.exitcode is not None and process.exitcode < 0:
            name = signal.Signals(-process.exitcode).name
            how = f"was ended by {name}" + (" (did main memory run out?)" if name == "SIGKILL" else "")
        return LigerprofError(f"rank {rank} {how}. Its output is in {_log(self._logs, rank)}.")

    def end(self) -> None:
        """End every rank: a rank that waits for a dead one would wait for minutes."""
        for connection in self._open:
            connection.close()
        for process in self._processes.values():
            process.join(0 if self._failed else _END_SECONDS)
            process.terminate()
        for process in self._processes.values():
            process.join(_END_SECONDS)
            process.kill()
            process.join()


def _log(logs: Path, rank: int) -> Path:
    return logs / f"rank-{rank}.log"


def _be_rank(work: Work, settings: Mapping[str, str], connection: Connection, log: Path) -> None:
    """The main function of a rank's process."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ.update(settings)
    _redirect_output(log)
    try:
        message: StepOutcome | LigerprofError = work(connection.send)
    except LigerprofError as error:
        message = error
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        message = LigerprofError(f"rank {settings['RANK']} failed ({reason}). Its output is in {log}.")
    # the parent may have closed its end already
    with contextlib.suppress(BrokenPipeError):
        connection.send(message)
    # torch's own exit handlers would wait for ranks that may have ended
    os._exit(0)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _redirect_output(log: Path) -> None:
    """Redirect stdout and stderr into a file, including those of C++ libraries and compilers."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)


def measure_on_ranks(
    recipe: TrainingRecipe,
    *,
    build: "Build",
    join: "Join | None" = None,
    trace_directory: Path | None,
    logs: Path,
    progress: Progress,
) -> StepOutcome:
    """Train on all GPUs of the recipe as `measure_step` does on one.

    Args:
        build: builds the training under the recipe's engine; a function that a new process can import.
        join: joins the ranks before; None: `build` does.
        logs: a folder for the output of the ranks that this process starts.

    Raises:
        MissingDependencyError: there are too few CUDA devices.
        RecipeError: the launcher's group does not have the recipe's number of GPUs.
        LigerprofError: a rank failed.
    """
    measure = partial(_measure_here, recipe, build, join, trace_directory)
    if (rank := rank_from_environment()) is not None:
        return _measure_as(rank, recipe, measure, progress)
    _require_devices(recipe.gpus)
    if recipe.gpus > 1:
        return merge_ranks(run_ranks(measure, recipe.gpus, logs, progress))
    with mock.patch.dict(os.environ, local_environment(0, 1, free_port())), _own_group():
        return measure(progress)


def _measure_here(
    recipe: TrainingRecipe, build: "Build", join: "Join | None", trace_directory: Path | None, progress: Progress
) -> StepOutcome:
    # a simulated step asks this module for its rank, and needs no torch
    from ligerprof.runs.measured.step import measure_step

    local = int(os.environ.get("LOCAL_RANK", "0"))
    _require_devices(local + 1)
    with _stdout_to_stderr():
        return measure_step(
            recipe, trace_directory=trace_directory, progress=progress, build=build, join=join, index=local
        )


def _require_devices(count: int) -> None:
    import torch

    if (found := torch.cuda.device_count()) < count:
        raise MissingDependencyError(f"{count} CUDA devices are needed, {found} found. Lower --gpus.")


def _measure_as(rank: Rank, recipe: TrainingRecipe, measure: Work, progress: Progress) -> StepOutcome:
    """Measure as one rank of a launcher's group; rank 0 returns all outcomes, the others their own."""
    if rank.world_size != recipe.gpus:
        raise RecipeError(
            f"WORLD_SIZE is {rank.world_size}, --gpus {recipe.gpus}: give --gpus the number of GPUs of all machines."
        )
    outcome = measure(progress)
    if outcome.oom is not None:
        # the other ranks wait for this one until the launcher ends them
        return merge_ranks({rank.rank: outcome})
    with _own_group():
        return merge_ranks(gather(rank, outcome))


def gather(rank: Rank, outcome: StepOutcome) -> dict[int, StepOutcome]:
    """All outcomes by rank on rank 0, only the rank's own on the others."""
    from torch import distributed

    found: list[Any] = [None] * rank.world_size
    distributed.gather_object(outcome, found if rank.rank == 0 else None)
    return dict(enumerate(found)) if rank.rank == 0 else {rank.rank: outcome}


@contextmanager
def _own_group() -> Iterator[None]:
    """Destroy the process group, if there is one, at exit."""
    from torch import distributed

    try:
        yield
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Keep stdout for results: DeepSpeed's logger and compilers print to it."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def measure_with_engine(
    recipe: TrainingRecipe, *, trace_directory: Path | None, logs: Path, progress: Progress
) -> StepOutcome:
    """Measure a step as `measure_on_ranks` does, under the recipe's engine.

    Raises:
        LigerprofError: as `measure_on_ranks`; MissingDependencyError also if the engine's package is not installed.
    """
    if recipe.engine is Engine.TORCH:
        return measure_step(recipe, trace_directory=trace_directory, progress=progress)
    build, join = engine_of(recipe.engine)
    return measure_on_ranks(
        recipe, build=build, join=join, trace_directory=trace_directory, logs=logs, progress=progress
    )


def follow_step(recipe: TrainingRecipe, *, trace: bool) -> StepOutcome:
    """Train as rank 1 or higher of a launcher's group; `trace` must be rank 0's, since all ranks run the same steps."""
    with TemporaryDirectory() as folder:
        logs = Path(folder)
        return measure_with_engine(
            recipe, trace_directory=logs if trace else None, logs=logs, progress=lambda _text: None
        )


def engine_of(engine: Engine) -> tuple[Build, Join | None]:
    """What builds the training, and what joins the ranks before; DeepSpeed joins them itself."""
    if engine in TRAINERS:
        return TRAINERS[engine], join_process_group
    require_deepspeed()
    return deepspeed_trainer, None
