"""How a recipe is typed: the options that differ from the defaults, so that any recipe can be run again."""

import dataclasses
import shlex
from typing import Any

from ligerprof.recipe.training import RECIPE_OPTIONS, TrainingRecipe


def recipe_flags(recipe: TrainingRecipe) -> tuple[str, ...]:
    """The words after `ligerprof step` that make this recipe, options at their defaults left out."""
    model = recipe.model if isinstance(recipe.model, str) else recipe.model.name
    # what this recipe gets for options whose default depends on others, if they are left out
    dependent: dict[str, Any] = {name: item.default for name, item in RECIPE_OPTIONS.items() if item.default_text}
    resolved = dataclasses.replace(recipe, **dependent)
    words = list(RECIPE_OPTIONS["model"].typed(model))
    for name, declared in RECIPE_OPTIONS.items():
        default = getattr(resolved, name) if declared.default_text else declared.default
        value = getattr(recipe, name)
        if name != "model" and value != default:
            words += declared.typed(value)
    return tuple(words)


def command_line(command: str, recipe: TrainingRecipe) -> str:
    """The whole line to type in a shell."""
    return shlex.join(["ligerprof", command, *recipe_flags(recipe)])
