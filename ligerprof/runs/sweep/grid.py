"""Which training steps a grid of options means, and in which order they run."""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ligerprof.errors import LigerprofError
from ligerprof.recipe.training import RECIPE_OPTIONS, TrainingRecipe
from ligerprof.units import format_bytes

# neighbours in time: what is compared with each other runs one after the other, at each size
KERNEL_OPTIONS = ("liger", "provider", "flce_budget")
SIZE_OPTIONS = ("batch", "seq")
_ALWAYS_TOLD = (*SIZE_OPTIONS, "liger", "provider")
_KEY_DIGITS = 16
_DEFAULTS: dict[str, Any] = {name: declared.default for name, declared in RECIPE_OPTIONS.items()}

# raises a LigerprofError where a recipe cannot be carried out
Inspector = Callable[[TrainingRecipe], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Values of recipe options; every combination is a training step.

    Attributes:
        options: fields of a recipe, each with at least one value; absent fields keep their default.
        variants: fields that go together, such as a kernel set with its provider; each is combined with
            every combination of the options.
    """

    options: Mapping[str, tuple[Any, ...]]
    variants: tuple[Mapping[str, Any], ...] = ({},)

    def combinations(self) -> Iterator[dict[str, Any]]:
        """Values of one step each: sizes ascending, kernels next to each other at each size."""
        names = list(self.options)
        kernels = [name for name in names if name in KERNEL_OPTIONS]
        sizes = [name for name in names if name in SIZE_OPTIONS]
        others = [name for name in names if name not in (*KERNEL_OPTIONS, *SIZE_OPTIONS)]
        for other, size, kernel, variant in itertools.product(
            self._products(others), sorted(self._products(sizes), key=_tokens), self._products(kernels), self.variants
        ):
            yield other | size | kernel | dict(variant)

    def to_json(self) -> dict[str, Any]:
        """The options with their values, and the variants."""
        variants = [dict(variant) for variant in self.variants]
        return {"options": {name: list(values) for name, values in self.options.items()}, "variants": variants}

    def _products(self, names: list[str]) -> list[dict[str, Any]]:
        return [
            dict(zip(names, values, strict=True)) for values in itertools.product(*map(self.options.__getitem__, names))
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """A combination that no recipe can be, and why."""

    values: Mapping[str, Any]
    reason: str


def expand(grids: Iterable[Grid], inspect: Inspector) -> tuple[tuple[TrainingRecipe, ...], tuple[Refusal, ...]]:
    """Recipes of all grids in order, each once, and the combinations that are none.

    Args:
        inspect: refuses what cannot run here.
    """
    recipes: dict[str, TrainingRecipe] = {}
    refusals = []
    for values in itertools.chain.from_iterable(grid.combinations() for grid in grids):
        try:
            recipe = without_idle_options(TrainingRecipe(**values))
            inspect(recipe)
        except LigerprofError as error:
            refusals.append(Refusal(values=values, reason=str(error)))
        else:
            recipes.setdefault(cell_key(recipe), recipe)
    return tuple(recipes.values()), tuple(refusals)


def without_idle_options(recipe: TrainingRecipe) -> TrainingRecipe:
    """The same step with options of kernels that it does not use at their defaults, so that it runs once."""
    if not recipe.kernels:
        return dataclasses.replace(recipe, provider=_DEFAULTS["provider"], flce_budget=_DEFAULTS["flce_budget"])
    if "flce" not in recipe.kernels:
        return dataclasses.replace(recipe, flce_budget=_DEFAULTS["flce_budget"])
    return recipe


def cell_key(recipe: TrainingRecipe) -> str:
    """What a finished step is known again by: 16 hex digits over the whole recipe.

    Options at their defaults do not count, so that an option that a later version adds changes no key.
    """
    whole = recipe.to_json()
    values = {name: value for name, value in whole.items() if name == "model" or value != _DEFAULTS.get(name)}
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_KEY_DIGITS]


def line_of(recipe: TrainingRecipe) -> str:
    """What steps have in common that differ in batch and sequence alone."""
    return cell_key(dataclasses.replace(recipe, batch=1, seq=1))


def describe(recipe: TrainingRecipe, telling: Iterable[str]) -> str:
    """A step in a few words: its size, its kernels, and whatever else tells it from others.

    Args:
        telling: from `telling_options`.
    """
    kernels = f"{recipe.liger} ({recipe.provider})" if recipe.kernels else "no kernels"
    others = [option_text(recipe, name) for name in telling if name not in _ALWAYS_TOLD]
    return ", ".join([f"{recipe.batch} x {recipe.seq}", kernels, *others])


def telling_options(recipes: Iterable[TrainingRecipe]) -> tuple[str, ...]:
    """Fields that tell the recipes apart: size and kernels, the model where it differs, and others while they help."""
    found = tuple(recipes)
    columns = {name: [option_text(recipe, name) for recipe in found] for name in _DEFAULTS}
    told = [*_ALWAYS_TOLD, *(["model"] if len(set(columns["model"])) > 1 else [])]
    for name in columns:
        if _classes(columns, [*told, name]) > _classes(columns, told):
            told.append(name)
    return tuple(told)


def _classes(columns: Mapping[str, list[str]], names: list[str]) -> int:
    return len(set(zip(*(columns[name] for name in names), strict=True)))


def option_text(recipe: TrainingRecipe, name: str) -> str:
    """One option of a recipe in words."""
    value = getattr(recipe, name)
    if name == "model":
        return recipe.spec.name
    if name == "memory_limit_bytes":
        return "no limit" if value is None else f"limit {format_bytes(value)}"
    return f"{name.replace('_', ' ')} {value}"


def _tokens(size: Mapping[str, int]) -> tuple[int, int]:
    batch, seq = (size.get(name, _DEFAULTS[name]) for name in SIZE_OPTIONS)
    return batch * seq, batch
