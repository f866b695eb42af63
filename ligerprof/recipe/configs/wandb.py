"""wandb's config.yaml of a run: each key wrapped in an object, the Trainer's arguments next to the model's config."""

from collections.abc import Mapping
from typing import Any

from ligerprof.errors import UnknownModelError
from ligerprof.models import spec_from_config
from ligerprof.recipe.configs import rows, shared
from ligerprof.recipe.configs.settings import Reading, Setting
from ligerprof.recipe.configs.trainer import TRANSFORMERS
from ligerprof.recipe.configs.trl import TRL_DPO, TRL_REWARD, TRL_RL, TRL_SFT
from ligerprof.text import printable

NAME = "wandb"
_OWN = frozenset({"wandb_version", "_wandb"})
_WRAPPING = frozenset({"desc", "value"})
_SIZES = ("hidden_size", "n_embd", "d_model")
_ARGUMENTS = frozenset(
    key for framework in (TRANSFORMERS, TRL_SFT, TRL_DPO, TRL_REWARD, TRL_RL) for key in framework.rows
)
# of the model's config, where arguments may have the same names: generation, and how the model was loaded
_OF_MODEL = frozenset(
    {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "is_encoder_decoder", "use_cache", "config"}
    | {"dtype", "torch_dtype", "attn_implementation", "quantization_config", "rope_scaling", "chat_template", "tools"}
)
# PretrainedConfig's default of a generation's length
_GENERATED = 20
# versions of transformers: the config has the dtype of the loaded weights, and they have the checkpoint's by default
_WRITES_LOADED, _LOADS_CHECKPOINTS, _LONGEST_NUMBER = [4, 48], [5, 0], 6
_NESTED_QUANT = "bnb_4bit_use_double_quant"


def unwrapped(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """The keys of a run without wandb's wrapping; None for any other file."""
    wrapped = {key: each for key, each in values.items() if key != "wandb_version"}
    if not all(isinstance(each, Mapping) and {"value"} <= each.keys() <= _WRAPPING for each in wrapped.values()):
        return None
    return {key: each["value"] for key, each in wrapped.items() if key not in _OWN} or None


def is_trainers(run: Mapping[str, Any]) -> bool:
    """Whether a run has the config of a model, as the callback of transformers' Trainer writes it."""
    return isinstance(run.get("model_type"), str) and any(key in run for key in _SIZES)


def arguments_of(run: Mapping[str, Any]) -> dict[str, Any]:
    """The Trainer's arguments of a run without the model's config."""
    found = {key: value for key, value in run.items() if key in _ARGUMENTS - _OF_MODEL}
    if found.get("max_length") == _GENERATED:
        del found["max_length"]
    return found


def read_run(run: Mapping[str, Any], framework: rows.Framework, file: str) -> Reading:
    """Read the unwrapped keys of a Trainer's run, whose arguments are those of a framework.

    Raises:
        RecipeError: a value that its key does not take.
        UnknownModelError: the model's config does not describe a supported model.
    """
    known = framework.rows.keys()
    reading = framework.read({key: value for key, value in arguments_of(run).items() if key in known}, file)
    reading.framework = NAME
    config = {key: value for key, value in run.items() if key not in _ARGUMENTS or key in _OF_MODEL}
    quantization, adapters = config.pop("quantization_config", None), config.pop("peft_config", None)
    name = run.get("_name_or_path") or run.get("model_name_or_path") or run["model_type"]
    try:
        spec = spec_from_config(config, name=str(name))
    except UnknownModelError as error:
        raise UnknownModelError(f"{file}: {error}") from None
    reading.set("model_type", {Setting.MODEL: spec}, words=f"the sizes of {spec.name}")
    _set_weights(reading, run)
    for key in ("attn_implementation", "_attn_implementation"):
        if rows.is_on(run, key):
            rows.apply_row(shared.ATTENTION, key, run[key], reading)
    if isinstance(quantization, Mapping):
        _set_quantization(reading, quantization)
    if not rows.is_off(adapters):
        _set_adapter(reading, adapters)
    return reading


def _set_weights(reading: Reading, run: Mapping[str, Any]) -> None:
    """The dtype of the model's config is that of the loaded weights, from version 4.48 on; null is float32 before 5."""
    key = next((key for key in ("dtype", "torch_dtype") if rows.is_on(run, key)), None)
    version = str(run.get("transformers_version", ""))
    numbers = [int(part) for part in version.split(".")[:2] if part.isdecimal() and len(part) < _LONGEST_NUMBER]
    if key is not None:
        rows.apply_row(shared.DTYPE, key, run[key], reading)
        before = "" if numbers >= _WRITES_LOADED else f", which before 4.48 may be the checkpoint's; it ran {version}"
        reading.assumed.append(printable(f"weights were loaded in {run[key]}, the {key} of the run{before}")[:160])
    elif numbers and numbers < _LOADS_CHECKPOINTS:
        reading.defaults[Setting.WEIGHTS] = "float32"
        reading.assumed.append(
            printable(f"weights were loaded in float32, the default of transformers {version}")[:160]
        )


def _set_quantization(reading: Reading, quantization: Mapping[str, Any]) -> None:
    if quantization.get("quant_method", "bitsandbytes") != "bitsandbytes":
        reading.lack("quantization_config", f"weights of {quantization['quant_method']}")
        return
    known = shared.quantization_rows()
    for key, value in quantization.items():
        if key in known and value is not None:
            rows.apply_row(known[key], f"quantization_config.{key}", value, reading)
    if Setting.BITS in reading.settings:
        reading.defaults[Setting.NESTED_QUANT] = rows.is_on(quantization, _NESTED_QUANT)


def _set_adapter(reading: Reading, adapters: Any) -> None:
    adapter = next(iter(adapters.values()), None) if isinstance(adapters, Mapping) and len(adapters) == 1 else None
    kind = adapter.get("peft_type", "LORA") if isinstance(adapter, Mapping) else "unreadable"
    if not isinstance(adapter, Mapping) or str(kind).rpartition(".")[2] != "LORA":
        reading.lack("peft_config", f"an adapter that is {str(kind)[:40]}", setting=Setting.RANK)
        return
    reading.set("peft_config", {Setting.RANK: rows.whole_number_at(reading, "peft_config.r", adapter.get("r", 8))})
    # peft's default
    reading.defaults[Setting.LORA_DROPOUT] = 0.0
    targets = adapter.get("target_modules")
    if targets:
        named = targets if targets == "all-linear" else rows.modules_at(reading, "peft_config.target_modules", targets)
        reading.set("peft_config.target_modules", {Setting.LORA_TARGETS: named})
    for key, argument in (
        ("lora_dropout", "lora_dropout"),
        ("use_dora", "use_dora"),
        ("modules_to_save", "lora_modules_to_save"),
        ("target_parameters", "lora_target_parameters"),
    ):
        rows.apply_row(TRL_SFT.rows[argument], f"peft_config.{key}", adapter.get(key), reading)
