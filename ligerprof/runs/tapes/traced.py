"""Find the tape of a recipe's model in the cache, or trace it."""

from dataclasses import replace

from ligerprof.models import ParameterShape
from ligerprof.models.tape import Tape
from ligerprof.recipe.training import TrainingRecipe


def with_tape_of(recipe: TrainingRecipe, tape: Tape) -> TrainingRecipe:
    """The recipe with a traced model."""
    parameters = tuple(
        ParameterShape(name=item.name, shape=item.shape, trained=item.trained) for item in tape.parameters
    )
    spec = replace(recipe.spec, parameters=parameters, no_estimate_reason=None, tape=tape)
    return replace(recipe, model=spec)
