"""The keys of a configuration file that say how DeepSpeed or FSDP2 shards and offloads a recipe."""

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
_ACCELERATE, _AXOLOTL, _TITAN = "accelerate", "axolotl", "torchtitan"
# what FSDP2's settings say of a recipe
_FSDP_OPTIONS = ("engine", "offload", "reshard", "wrap", "reduce_dtype", "zero", "bucket_view", "grad_sync")
_WRAP = "TRANSFORMER_BASED_WRAP"


class ShardingKeys(NamedTuple):
    """Keys with new values that make a file train with DeepSpeed or FSDP2 as a recipe does.

    Attributes:
        options: the recipe's options that they decide.
        before: what the values replace, with the content of a file that one names.
    """

    keys: Mapping[str, Any]
    options: frozenset[str]
    before: Mapping[str, Any]


NO_KEYS = ShardingKeys({}, frozenset(), {})


def sharding_keys(file: str, framework: str, values: Mapping[str, Any], recipe: TrainingRecipe) -> ShardingKeys:
    """The keys of a file for a recipe that trains with DeepSpeed or FSDP2; none for other recipes.

    A file that names DeepSpeed's JSON gets its content, changed, under the same key; one of accelerate leaves that to
    the JSON.

    Args:
        file: the path of the configuration file, of the given framework.
        values: its content.

    Raises:
        RecipeError: DeepSpeed's JSON, which the file names, cannot be read.
    """
    if recipe.engine is Engine.FSDP2:
        return _fsdp2_keys(framework, recipe)
    if recipe.engine is not Engine.DEEPSPEED or recipe.precision not in _PRECISIONS:
        return NO_KEYS
    decided = {*_OPTIONS, *(() if recipe.offload is Offload.NONE else ("optimizer",))}
    if framework == _OWN:
        return ShardingKeys(
            {"zero_optimization": _zero(values.get("zero_optimization"), recipe)}, frozenset(decided), values
        )
    if framework == _ACCELERATE:
        return _launched_deepspeed(values, recipe, frozenset({*decided, "precision"}))
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


def _launched_deepspeed(values: Mapping[str, Any], recipe: TrainingRecipe, options: frozenset[str]) -> ShardingKeys:
    section = values.get("deepspeed_config")
    if isinstance(section, Mapping) and "deepspeed_config_file" in section:
        return NO_KEYS
    place = recipe.offload.device if recipe.offload is not Offload.NONE else "none"
    settings: dict[str, Any] = {
        "zero_stage": recipe.zero,
        "offload_optimizer_device": place,
        "offload_param_device": place if recipe.offload.moves_parameters else "none",
        "zero3_init_flag": recipe.zero == 3,
        **({} if recipe.nvme_path is None else {"offload_optimizer_nvme_path": recipe.nvme_path}),
        **({} if recipe.nvme_path is None else {"offload_param_nvme_path": recipe.nvme_path}),
    }
    keys = {
        "distributed_type": "DEEPSPEED",
        "mixed_precision": _PRECISIONS[recipe.precision],
        **{f"deepspeed_config.{key}": value for key, value in settings.items()},
    }
    return ShardingKeys(keys, options, {})


def _fsdp2_keys(framework: str, recipe: TrainingRecipe) -> ShardingKeys:
    if recipe.precision is not Precision.MIXED or (recipe.replicate > 1 and framework != _TITAN):
        return NO_KEYS
    offloads = recipe.offload is not Offload.NONE
    options = frozenset({*_FSDP_OPTIONS, "precision"})
    if framework == _TITAN:
        keys: dict[str, Any] = {
            "parallelism.data_parallel_shard_degree": recipe.gpus // recipe.replicate,
            "parallelism.data_parallel_replicate_degree": recipe.replicate,
            "parallelism.fsdp_reshard_after_forward": "default" if recipe.reshard else "never",
            "training.enable_cpu_offload": offloads,
        }
        return ShardingKeys(keys, options | {"replicate"}, {})
    settings = {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": _WRAP,
        "fsdp_reshard_after_forward": recipe.reshard,
        "fsdp_offload_params": offloads,
    }
    if framework == _ACCELERATE:
        keys = {"distributed_type": "FSDP", "mixed_precision": "bf16", **_in_section(settings)}
    elif framework == _AXOLOTL:
        plain = {key.removeprefix("fsdp_"): value for key, value in settings.items() if key != "fsdp_version"}
        keys = {"fsdp_version": 2, "bf16": True, **_in_section(plain)}
    elif framework in _INLINE:
        # the Trainer wraps and offloads by the words of `fsdp`
        words = f"full_shard auto_wrap{' offload' if offloads else ''}"
        plain = {"version": 2, "reshard_after_forward": recipe.reshard}
        keys = {"fsdp": words, "bf16": True, **_in_section(plain)}
    else:
        return NO_KEYS
    return ShardingKeys(keys, options, {})


def _in_section(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {f"fsdp_config.{key}": value for key, value in settings.items()}


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
