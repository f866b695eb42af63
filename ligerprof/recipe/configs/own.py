"""ligerprof's own files: the recipe.json and result.json of a run, and any JSON that a command printed."""

from collections.abc import Mapping
from typing import Any

from ligerprof.recipe.categories import Engine, Precision
from ligerprof.recipe.configs.settings import Reading, Setting
from ligerprof.recipe.training import RECIPE_OPTIONS, TrainingRecipe

NAME = "ligerprof"
# what each precision is made of: the dtype of the loaded weights, and autocast's
PRECISIONS: Mapping[tuple[str, str], str] = {
    ("float32", "no"): "fp32",
    ("float32", "bf16"): "amp",
    ("float32", "fp16"): "amp-fp16",
    ("bfloat16", "no"): "bf16",
    ("float16", "no"): "fp16",
    ("bfloat16", "bf16"): "bf16-amp",
    ("float16", "fp16"): "fp16-amp",
}
# under DeepSpeed, which keeps fp32 master copies of its own
MIXED_PRECISIONS: Mapping[str, str] = {"bf16": "mixed", "fp16": "mixed-fp16"}
# options that are made of settings, or that a recipe has for reasons of this machine
_DERIVED = ("precision", "lora", "qlora", "quantization", "deepspeed_config", "model")


def recipe_values(values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The recipe in a document of ours; None for any other document."""
    if "schema" in values and "kind" in values and isinstance(values.get("recipe"), Mapping):
        return values["recipe"]  # type: ignore[no-any-return]
    if "model_config" in values and "precision" in values:
        return values
    return None


def read_recipe(values: Mapping[str, Any], file: str) -> Reading:
    """Read the recipe of a document of ours.

    Raises:
        RecipeError: an unknown key, or a value that the option does not take.
    """
    recipe = TrainingRecipe.from_json(values)
    reading = Reading(file=file, framework=NAME)
    for name in values:
        if name in RECIPE_OPTIONS and name not in _DERIVED:
            value = getattr(recipe, name)
            if name in tuple(Setting):
                reading.set(name, {Setting(name): value}, words=str(value))
            else:
                reading.options[name] = value
                reading.read[name] = str(value)
    reading.set("model", {Setting.MODEL: recipe.model}, words=recipe.spec.name)
    reading.set("precision", _parts_of(recipe.precision), words=recipe.precision)
    rank, bits = recipe.lora or recipe.qlora, recipe.packed_bits
    reading.set("qlora" if recipe.qlora else "lora", {Setting.RANK: rank, Setting.BITS: bits}, words=f"rank {rank}")
    if recipe.engine is Engine.DEEPSPEED:
        reading.set("deepspeed_config", {Setting.DEEPSPEED: dict(recipe.deepspeed_config or {})})  # type: ignore[arg-type]
    return reading


def _parts_of(precision: Precision) -> dict[Setting, str | None]:
    for autocast, word in MIXED_PRECISIONS.items():
        if word == precision:
            return {Setting.WEIGHTS: None, Setting.AUTOCAST: autocast}
    weights, autocast = next(parts for parts, word in PRECISIONS.items() if word == precision)
    return {Setting.WEIGHTS: weights, Setting.AUTOCAST: autocast}
