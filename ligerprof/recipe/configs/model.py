"""The model of configuration files: by the name in them, or the known one that `--like` names in its place."""

from ligerprof.errors import RecipeError, UnknownModelError
from ligerprof.models import DEFAULT_MODEL, ModelSpec, load_model
from ligerprof.recipe.configs.settings import Found
from ligerprof.text import printable


def model_of(found: Found | None, like: str | None, trains: str | None, assumed: list[str]) -> ModelSpec:
    """Describe the model that files name.

    Args:
        found: the name, or a spec.
        like: the model of `--like`, or None.
        trains: the file or command that describes a whole training, which must name its model; None without one.
        assumed: gets a sentence if no file names a model.

    Raises:
        RecipeError: a training that names no model.
        UnknownModelError: nothing has the name, or its architecture has no row.
    """
    if found is None and like is None and trains is not None:
        raise RecipeError(f"{trains}: names no model that ligerprof reads. Give it with --model.")
    if found is None:
        option = "--model chooses another" if like is None else "of --like"
        assumed.append(f"no file names a model: {printable(like or DEFAULT_MODEL)} ({option})")
        return load_model(like or DEFAULT_MODEL)
    if isinstance(found.value, ModelSpec):
        return found.value
    try:
        return load_model(found.value, like)
    except UnknownModelError as error:
        raise UnknownModelError(f"{found.place}: {error}" if found.file else str(error)) from None
