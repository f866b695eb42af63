"""Import what `ligerprof step` needs on the simulator, and start or run nothing: plug-ins are left to the cells."""

from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

_MODULES = (
    "ligerprof.cli.step",
    "ligerprof.reports.page.run",
    "ligerprof.reports.step",
    "ligerprof.reports.tensorboard",
    "ligerprof.runs.measured.ranks",
    "ligerprof.runs.step",
    "ligerprof.runs.simulated",
    "ligerprof.kernels.patching.apply",
    "transformers.masking_utils",
    "torch.utils.tensorboard",
    "matplotlib.pyplot",
    "matplotlib.backends.backend_svg",
    "matplotlib.backends.backend_agg",
)


def prepare(values: Mapping[str, Any]) -> None:
    """Import the modules of a recipe, given as its JSON; a module that fails is left to the step, which reports why."""
    for name in _MODULES:
        with suppress(Exception):
            import_module(name)
    with suppress(Exception):
        import_model(values)


def import_model(values: Mapping[str, Any]) -> None:
    """Import the classes of a recipe's model, and of its adapters."""
    from ligerprof.recipe.training import TrainingRecipe
    from ligerprof.runs.training import find_architecture

    recipe = TrainingRecipe.from_json(values)
    find_architecture(recipe.spec)
    if recipe.lora is not None or recipe.qlora is not None:
        import_module("peft")
