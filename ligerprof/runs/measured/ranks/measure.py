"""Measure a step as one rank of several: in ranks started here, or as one rank of a launcher's group."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from ligerprof.errors import MissingDependencyError, RecipeError
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.measured.ranks.group import Rank, merge_ranks, rank_from_environment
from ligerprof.runs.measured.ranks.launch import Work, free_port, local_environment, run_ranks
from ligerprof.runs.measured.step import Build, Join, measure_step
from ligerprof.runs.outcome import Progress, StepOutcome


def measure_on_ranks(
    recipe: TrainingRecipe,
    *,
    build: Build,
    join: Join | None = None,
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
    recipe: TrainingRecipe, build: Build, join: Join | None, trace_directory: Path | None, progress: Progress
) -> StepOutcome:
    """Measure in this process, on the GPU of its LOCAL_RANK."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    _require_devices(local + 1)
    with _stdout_to_stderr():
        return measure_step(
            recipe,
            trace_directory=trace_directory,
            progress=progress,
            build=build,
            join=join,
            index=local,
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
