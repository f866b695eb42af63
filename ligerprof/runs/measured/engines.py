"""Measure a step under the recipe's engine: plain torch in this process, the others on one or several ranks."""

from pathlib import Path
from tempfile import TemporaryDirectory

from ligerprof.recipe.categories import Engine
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.measured.deepspeed import deepspeed_trainer, require_deepspeed
from ligerprof.runs.measured.ranks import measure_on_ranks
from ligerprof.runs.measured.step import Build, Join, measure_step
from ligerprof.runs.outcome import Progress, StepOutcome
from ligerprof.runs.parallel import ddp_trainer, fsdp2_trainer, join_process_group


def measure_with_engine(
    recipe: TrainingRecipe, *, trace_directory: Path | None, logs: Path, progress: Progress
) -> StepOutcome:
    """Measure a step as `measure_step` does, under the recipe's engine.

    Args:
        logs: a folder for the output of the ranks that this process starts.

    Raises:
        MissingDependencyError: the engine's package is not installed, or there are too few CUDA devices.
        RecipeError: the launcher's group does not have the recipe's number of GPUs.
        LigerprofError: a rank failed.
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
    if engine is Engine.DDP:
        return ddp_trainer, join_process_group
    if engine is Engine.FSDP2:
        return fsdp2_trainer, join_process_group
    require_deepspeed()
    return deepspeed_trainer, None
