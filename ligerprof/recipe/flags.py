"""How a recipe is typed: the options that differ from the defaults, so that any recipe can be run again."""

import dataclasses
import shlex
from typing import Any

from ligerprof.recipe.categories import Optimizer
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.units import GIB, MIB

_NAMES = {"memory_limit_bytes": "memory-limit"}
_SIZES = ("memory_limit_bytes", "flce_budget")
_SWITCHES = {"checkpointing": "--no-checkpointing", "reentrant": "--reentrant"}


def recipe_flags(recipe: TrainingRecipe) -> tuple[str, ...]:
    """The words after `ligerprof step` that make this recipe, options at their defaults left out."""
    model = recipe.model if isinstance(recipe.model, str) else recipe.model.name
    words = ["--model", model]
    # what optimizer and clip come to where they are not given
    resolved = dataclasses.replace(recipe, optimizer=Optimizer.DEFAULT, clip=None)
    for item in dataclasses.fields(recipe):
        if not item.init or item.name == "model":
            continue
        default = getattr(resolved, item.name) if item.name in ("optimizer", "clip") else item.default
        value = getattr(recipe, item.name)
        if value != default:
            words += _option(item.name, value)
    return tuple(words)


def command_line(command: str, recipe: TrainingRecipe) -> str:
    """The whole line to type in a shell."""
    return shlex.join(["ligerprof", command, *recipe_flags(recipe)])


def _option(name: str, value: Any) -> list[str]:
    if name in _SWITCHES:
        return [_SWITCHES[name]]
    flag = _NAMES.get(name, name.replace("_", "-"))
    return [f"--{flag}", size_text(value) if name in _SIZES and isinstance(value, int) else str(value)]


def size_text(size_bytes: int) -> str:
    """A size that reads back as the same bytes, in the largest unit that allows it."""
    if size_bytes % GIB == 0:
        return f"{size_bytes // GIB}GiB"
    return f"{size_bytes // MIB}MiB" if size_bytes % MIB == 0 else str(size_bytes)
