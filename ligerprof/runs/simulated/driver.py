"""Simulate a recipe's step in another process, whose `cuda` is a simulated GPU."""

from importlib.util import find_spec

from ligerprof.recipe.conflicts import require_packages, require_supported
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.recipe.usable_memory import find_limit
from ligerprof.runs.outcome import Progress, StepOutcome
from ligerprof.runs.simulated.worker import SIMULATE, worker
from ligerprof.snapshots.collector import collector_paused


def simulate_step(
    recipe: TrainingRecipe, *, record: bool = True, repeat: bool = True, progress: Progress | None = None
) -> StepOutcome:
    """Run one profiled step of a recipe without a GPU.

    Args:
        recipe: what to train, how, and on which GPU.
        record: whether to record events for the outcome's snapshot.
        repeat: whether to record also those micro-batches that repeat the events of earlier ones.
        progress: callback that receives a short status message.

    Raises:
        UnsupportedError: the simulator does not cover an option.
        KernelUnavailableError: kernels that cannot be simulated.
        MissingDependencyError: a package or a C++ compiler is missing.
        ModelCodeError: the model's own code fails on the recipe.
        RecipeError: a memory limit above the GPU's memory, or allocator settings that torch would refuse.
    """
    require_supported(recipe, command="simulate", simulated=True)
    require_packages(recipe, command="simulate", simulated=True)
    find_limit(recipe)
    for package in ("torch", "transformers"):
        # before the other process, whose errors lose the name
        if find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    # the collector would walk over all objects of a snapshot that arrives
    with collector_paused():
        outcome: StepOutcome = worker().run(SIMULATE, recipe, progress or _silent, record=record, repeat=repeat)
    return outcome


def _silent(_text: str) -> None:
    pass
