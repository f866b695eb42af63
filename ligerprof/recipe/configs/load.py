"""Load a recipe from configuration files: the entry point of this package."""

from collections.abc import Mapping, Sequence
from typing import Any

from ligerprof.recipe.configs.framework import UNUSED
from ligerprof.recipe.configs.report import ConfigReport, report_of
from ligerprof.recipe.configs.resolve import Resolver, counted
from ligerprof.recipe.configs.settings import Reading
from ligerprof.recipe.configs.sources import Documents, read_sources
from ligerprof.recipe.training import TrainingRecipe


def load_options(
    sources: Sequence[str],
    given: Mapping[str, Any],
    documents: Documents | None = None,
    command: Sequence[Reading] = (),
) -> tuple[dict[str, Any], ConfigReport]:
    """Read configuration files into values of recipe options.

    Args:
        sources: files in order, as `read_sources` takes them; later ones win.
        given: recipe options that win over all files.
        documents: the content of some of the files, as `read_sources` takes it.
        command: what a training command sets, which wins over the files.

    Raises:
        RecipeError: a file that cannot be read, or a value that its key does not take.
        UnsupportedError: a file asks for something that recipes cannot express.
    """
    readings = read_sources(sources, documents, command)
    if "lora" in given or "qlora" in given:
        for reading in readings:
            reading.left_out = {key: what for key, what in reading.left_out.items() if what != UNUSED}
    resolver = Resolver(readings, given)
    options = resolver.options()
    return options, report_of(readings, (*counted(options, resolver.found, given), *resolver.assumed))


def load_recipe(sources: Sequence[str], given: Mapping[str, Any]) -> tuple[TrainingRecipe, ConfigReport]:
    """The recipe that configuration files describe; as `load_options`, which it calls."""
    options, report = load_options(sources, given)
    return TrainingRecipe(**options), report
