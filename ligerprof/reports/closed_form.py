"""The closed form's peak of a recipe, beside what was measured, simulated or is still to run."""

from ligerprof.analyzers.estimate import estimate
from ligerprof.errors import LigerprofError
from ligerprof.recipe.training import TrainingRecipe


def estimated_peak_bytes(recipe: TrainingRecipe) -> int | None:
    """As this version computes it, whatever a row recorded; None for an architecture or option without closed form."""
    try:
        return estimate(recipe).peak_bytes
    except LigerprofError:
        return None
