"""The recipe that a run directory holds."""

from pathlib import Path

from ligerprof.errors import LigerprofError, RecipeError
from ligerprof.files import FileKind, read_json
from ligerprof.recipe import RECIPE_NAME
from ligerprof.recipe.training import TrainingRecipe

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
