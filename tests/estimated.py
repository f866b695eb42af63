"""Estimates that tests share: each recipe is estimated once per process, whichever search, report or test asks."""

import functools

from ligerprof import analyzers
from ligerprof.analyzers.estimate import MemoryEstimate, analytic
from ligerprof.recipe.training import TrainingRecipe

# for tests that change how, or count what, an estimate computes
fresh = analytic.estimate
# an estimate holds the events of its run, so the latest are kept
_known = functools.lru_cache(maxsize=160)(fresh)


@functools.wraps(fresh)
def estimate(recipe: TrainingRecipe) -> MemoryEstimate:
    """The estimate; a file of lengths may have changed since the last one, and settings of DeepSpeed have no hash."""
    return _known(recipe) if recipe.lengths is None and recipe.deepspeed_config is None else fresh(recipe)


def share() -> None:
    """Let modules that are imported from now on share estimates."""
    analytic.estimate = analyzers.estimate.estimate = estimate


def needed_bytes(recipe: TrainingRecipe) -> int:
    return estimate(recipe).highest_peak_bytes
