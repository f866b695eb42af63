"""The training steps of a grid of options, and the order in which they run."""

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ligerprof.errors import LigerprofError, RecipeError
from ligerprof.recipe.categories import Attention, Axis
from ligerprof.recipe.training import RECIPE_OPTIONS, TrainingRecipe
from ligerprof.units import format_bytes

# at each size these vary fastest: steps that are compared with each other run one after the other
KERNEL_OPTIONS = ("liger", "provider", "flce_budget")
AXES = tuple(Axis)
# weeks of training steps; looking at more takes minutes
_MOST_COMBINATIONS = 100_000
_ALWAYS_SHOWN = (*AXES, "liger", "provider")
_DEFAULTS: dict[str, Any] = {name: declared.default for name, declared in RECIPE_OPTIONS.items()}
# in the keys of files: recipes settle the default, and sdpa was it before
_LEFT_OUT: dict[str, Any] = {**_DEFAULTS, "attention": Attention.SDPA}


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Values of recipe options; every combination is a training step.

    Attributes:
        options: recipe fields, each with at least one value; absent fields keep their default.
        variants: values of fields that change together, such as kernels and their provider; each is combined with
            every combination of the options.
    """

    options: Mapping[str, tuple[Any, ...]]
    variants: tuple[Mapping[str, Any], ...] = ({},)

    @property
    def size(self) -> int:
        """Number of combinations."""
        return math.prod(map(len, self.options.values())) * len(self.variants)

    def combinations(self) -> Iterator[dict[str, Any]]:
        """The values of each step: sizes ascending, and all kernels of a size before the next size."""
        kernels = [name for name in self.options if name in KERNEL_OPTIONS]
        sizes = [name for name in self.options if name in AXES]
        others = [name for name in self.options if name not in (*KERNEL_OPTIONS, *AXES)]
        for other, size, kernel, variant in itertools.product(
            self._products(others), sorted(self._products(sizes), key=_tokens), self._products(kernels), self.variants
        ):
            yield {**other, **size, **kernel, **variant}

    def _products(self, names: Sequence[str]) -> list[dict[str, Any]]:
        return [
            dict(zip(names, values, strict=True)) for values in itertools.product(*map(self.options.__getitem__, names))
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """A combination that cannot be trained, and the reason."""

    options: Mapping[str, Any]
    reason: str


def expand(
    grids: Iterable[Grid], inspect: Callable[[TrainingRecipe], None]
) -> tuple[tuple[TrainingRecipe, ...], tuple[Refusal, ...]]:
    """The recipes of all grids in order, without duplicates, and the combinations that cannot be trained.

    Args:
        inspect: raises a LigerprofError for a recipe that cannot run here.

    Raises:
        RecipeError: there are too many combinations.
    """
    grids = tuple(grids)
    if (count := sum(grid.size for grid in grids)) > _MOST_COMBINATIONS:
        raise RecipeError(f"the grid has {count:,} combinations, more than {_MOST_COMBINATIONS:,}. Name fewer values.")
    recipes: dict[str, TrainingRecipe] = {}
    refusals = []
    for values in itertools.chain.from_iterable(grid.combinations() for grid in grids):
        try:
            recipe = without_unused_options(TrainingRecipe(**values))
            inspect(recipe)
        except LigerprofError as error:
            refusals.append(Refusal(options=values, reason=str(error)))
        else:
            recipes.setdefault(cell_key(recipe), recipe)
    return tuple(recipes.values()), tuple(refusals)


def without_unused_options(recipe: TrainingRecipe) -> TrainingRecipe:
    """The recipe with options of unused kernels reset to their defaults, so that equal steps run once."""
    unused = () if "flce" in recipe.kernels else ("flce_budget",) if recipe.kernels else ("provider", "flce_budget")
    changes = {name: _DEFAULTS[name] for name in unused if getattr(recipe, name) != _DEFAULTS[name]}
    # a study asks for each cell many times, and a new recipe checks all of its options
    return dataclasses.replace(recipe, **changes) if changes else recipe


def cell_key(recipe: TrainingRecipe) -> str:
    """The key that identifies a step: 16 hex digits, a hash of the whole recipe.

    Options at their defaults are left out, so that keys stay the same when a later version adds an option.
    """
    values = {
        name: value for name, value in recipe.to_json().items() if name == "model" or value != _LEFT_OUT.get(name)
    }
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def describe(recipe: TrainingRecipe, distinguishing: Iterable[str]) -> str:
    """A step in a few words: its size, its kernels, and the options that distinguish it from others."""
    kernels = f"{recipe.liger} ({recipe.provider_names})" if recipe.kernels else "no kernels"
    others = [option_text(recipe, name) for name in distinguishing if name not in _ALWAYS_SHOWN]
    return ", ".join([f"{recipe.batch} x {recipe.seq}", kernels, *others])


def distinguishing_options(recipes: Iterable[TrainingRecipe]) -> tuple[str, ...]:
    """The fewest fields that distinguish the recipes: size and kernels, the model if it differs, then others."""
    found = tuple(recipes)
    columns = {name: [option_text(recipe, name) for recipe in found] for name in _DEFAULTS}
    shown = [*_ALWAYS_SHOWN, *(["model"] if len(set(columns["model"])) > 1 else [])]
    for name in columns:
        if _classes(columns, [*shown, name]) > _classes(columns, shown):
            shown.append(name)
    return tuple(shown)


def _classes(columns: Mapping[str, list[str]], names: list[str]) -> int:
    return len(set(zip(*(columns[name] for name in names), strict=True)))


def option_text(recipe: TrainingRecipe, name: str) -> str:
    """An option of a recipe in words."""
    value = getattr(recipe, name)
    if name == "model":
        return recipe.spec.name
    if name == "memory_limit_bytes":
        return "no limit" if value is None else f"limit {format_bytes(value)}"
    return f"{name.replace('_', ' ')} {value}"


def _tokens(size: Mapping[str, int]) -> tuple[int, int]:
    batch, seq = (size.get(name, _DEFAULTS[name]) for name in AXES)
    return batch * seq, batch
