"""How a recipe is typed: the options that differ from the defaults; and the recipe.json of a run directory."""

import dataclasses
import shlex
from pathlib import Path
from typing import Any

from ligerprof.errors import LigerprofError, RecipeError
from ligerprof.files import FileKind, read_json
from ligerprof.recipe import RECIPE_NAME
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


_FILE = FileKind(error=RecipeError, hint="Give a directory that `ligerprof step` wrote.")


def read_run_recipe(directory: Path) -> TrainingRecipe | None:
    """The recipe of a run directory; None if it has none, or one that this version cannot read."""
    file = directory / RECIPE_NAME
    if not file.is_file():
        return None
    try:
        return TrainingRecipe.from_json(read_json(file, _FILE))
    except LigerprofError:
        return None
