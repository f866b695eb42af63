"""The keys of a configuration file that say how DeepSpeed shards and offloads a recipe."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ligerprof.recipe.categories import Engine, Offload, Precision
from ligerprof.recipe.configs.sources import read_named
from ligerprof.recipe.deepspeed import zero_settings
from ligerprof.recipe.training import TrainingRecipe

# what DeepSpeed's settings say of a recipe
_OPTIONS = ("engine", "zero", "offload", "nvme_path", "deepspeed_config", "bucket_view", "grad_sync")
_AUTO = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
# keys of the Trainer for the precisions in which DeepSpeed trains; "auto" is axolotl's
_PRECISIONS = {Precision.MIXED: "bf16", Precision.MIXED_FP16: "fp16"}
_ON = (True, "true", "auto")
_INLINE, _OWN = ("transformers", "trl-sft", "axolotl", "llama-factory"), "deepspeed"


class ShardingKeys(NamedTuple):
    """Keys with new values that make a file train with DeepSpeed as a recipe does.

    Attributes:
        options: the recipe's options that they decide.
        before: what the values replace, with the content of a file that one names.
    """

    keys: Mapping[str, Any]
    options: frozenset[str]
    before: Mapping[str, Any]


NO_KEYS = ShardingKeys({}, frozenset(), {})


def deepspeed_keys(file: str, framework: str, values: Mapping[str, Any], recipe: TrainingRecipe) -> ShardingKeys:
    """The keys of a file for a recipe that trains with DeepSpeed; none for other recipes and files without such keys.

    A file that names DeepSpeed's JSON gets its content, changed, under the same key.

    Args:
        file: the path of the configuration file, of the given framework.
        values: its content.

    Raises:
        RecipeError: DeepSpeed's JSON, which the file names, cannot be read.
    """
    if recipe.engine is not Engine.DEEPSPEED or recipe.precision not in _PRECISIONS:
        return NO_KEYS
    decided = {*_OPTIONS, *(() if recipe.offload is Offload.NONE else ("optimizer",))}
    if framework == _OWN:
        return ShardingKeys(
            {"zero_optimization": _zero(values.get("zero_optimization"), recipe)}, frozenset(decided), values
        )
    if framework not in _INLINE:
        return NO_KEYS
    old = values.get("deepspeed")
    if isinstance(old, str):
        old, _ = read_named(file, framework, "deepspeed", old)
    section = dict(old) if isinstance(old, Mapping) else {}
    precision = _PRECISIONS[recipe.precision]
    for key in _AUTO:
        section.setdefault(key, "auto")
    section.setdefault(precision, {"enabled": "auto"})
    if recipe.offload is not Offload.NONE:
        # DeepSpeed's Adam on the CPU
        section.setdefault("optimizer", {"type": "AdamW", "params": dict.fromkeys(_ADAM, "auto")})
    section["zero_optimization"] = _zero(section.get("zero_optimization"), recipe)
    keys: dict[str, Any] = {"deepspeed": section}
    if values.get(precision) not in _ON:
        keys[precision] = True
    return ShardingKeys(keys, frozenset({*decided, "precision"}), {**values, "deepspeed": old})


_ADAM = ("lr", "betas", "eps", "weight_decay")


def _zero(old: Any, recipe: TrainingRecipe) -> dict[str, Any]:
    """The section `zero_optimization` with the recipe's stage and offload."""
    section = dict(old) if isinstance(old, Mapping) else {}
    section["stage"] = recipe.zero
    # DeepSpeed's own default depends on the stage
    section.setdefault("overlap_comm", zero_settings(recipe)["overlap_comm"])
    place: dict[str, Any] = {"device": recipe.offload.device}
    if recipe.nvme_path is not None:
        place["nvme_path"] = recipe.nvme_path
    for name, moves in (
        ("offload_optimizer", recipe.offload is not Offload.NONE),
        ("offload_param", recipe.offload.moves_parameters),
    ):
        inner = section.pop(name, None)
        if moves:
            section[name] = {**(inner if isinstance(inner, Mapping) else {}), **place}
    return section
