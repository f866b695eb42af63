"""How a file writes the options of a recipe: as the row that reads each of them, or with several keys together."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ligerprof.kernels.selection import select_kernels
from ligerprof.recipe.configs.rows import Row, Table
from ligerprof.recipe.configs.settings import Setting
from ligerprof.recipe.training import TrainingRecipe

# the keys of a framework for a value of a recipe, or None if it has none for that value; a dot separates a section
# from its key
Spelling = Callable[[TrainingRecipe], Mapping[str, Any] | None]
# switches of bitsandbytes; both at once are an error
BITS: Mapping[int | None, Mapping[str, bool]] = {
    None: {},
    4: {"load_in_4bit": True, "load_in_8bit": False},
    8: {"load_in_4bit": False, "load_in_8bit": True},
}


def rows_of(rows: Table, setting: Setting, prefix: str = "") -> Iterator[tuple[str, Row]]:
    """The rows of a table that set a setting alone, each with its key."""
    for name, row in rows.items():
        if row.sets is setting:
            yield f"{prefix}{name}", row
        yield from rows_of(row.children or {}, setting, f"{prefix}{name}.")


def as_read(rows: Table, options: str) -> dict[str, Spelling]:
    """Spellings of options, whose names are separated by spaces: by the first row that sets each."""
    return {name: _as_read(rows, name) for name in options.split()}


def _as_read(rows: Table, name: str) -> Spelling:
    key, row = next(rows_of(rows, Setting(name)))

    def spell(recipe: TrainingRecipe) -> Mapping[str, Any] | None:
        value = row.spell(getattr(recipe, name))
        return None if value is None else {key: value}

    return spell


def liger(keys: Mapping[str, Any], kernels: str = "all", fused_loss: Mapping[str, Any] | None = None) -> Spelling:
    """The switch of liger-kernel, which selects this set of kernels, and that of its fused loss alone."""

    def spell(recipe: TrainingRecipe) -> Mapping[str, Any] | None:
        found, switched = set(recipe.kernels), set(select_kernels(kernels, recipe.spec))
        if found == {"flce"} and found != switched:
            return fused_loss
        # the file may have switched on more by itself
        return keys if switched and switched <= found else None

    return spell


def adapter(spelling: Spelling) -> dict[str, Spelling]:
    """The same keys for LoRA, QLoRA and their weights; a recipe that leaves LoRA for QLoRA changes both."""
    return dict.fromkeys(
        ("lora", "qlora", "quantization"), lambda recipe: spelling(recipe) if recipe.lora or recipe.qlora else None
    )
