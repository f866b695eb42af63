"""TRL's configurations: SFT, and those of preference, reward and reinforcement methods, which recipes do not cover."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ligerprof.recipe.categories import Precision
from ligerprof.recipe.configs import rows, settings, shared, trainer
from ligerprof.recipe.configs.settings import OTHER_METHOD, OTHER_TRAINING, Lacking, Packing, Reading, Setting
from ligerprof.recipe.training import TrainingRecipe

_NO_LENGTH = Lacking(what="a sequence length of null", setting=Setting.SEQ)
_LENGTH = replace(rows.count(Setting.SEQ), null=_NO_LENGTH)


_INIT_KWARGS = {
    **rows.ignored_keys("trl", "model_init_kwargs"),
    **rows.each("dtype torch_dtype", shared.DTYPE),
    "attn_implementation": shared.ATTENTION,
    **rows.lacking("another configuration of the model", "config rope_scaling"),
    **rows.lacking("a quantization configuration", "quantization_config"),
    **rows.lacking("a model split over several GPUs", "device_map max_memory", harmless=("auto",)),
}
_COMMON: Mapping[str, rows.Row] = {
    **trainer.ROWS,
    **rows.ignored_keys("trl"),
    **rows.each("max_length max_seq_length", _LENGTH),
    "model_init_kwargs": rows.section(_INIT_KWARGS),
    "activation_offloading": rows.switch(Setting.ACTIVATION_OFFLOAD),
    # TRL 1.16 pads on Neuron only
    "pad_to_multiple_of": rows.count(Setting.PAD_TO_MULTIPLE_OF, auto=True),
    "accelerate_config": rows.Row(read=rows.file_name("accelerate")),
    # the model's arguments
    "model_name_or_path": rows.text(Setting.MODEL),
    **rows.each("dtype torch_dtype", shared.DTYPE),
    "attn_implementation": shared.ATTENTION,
    **rows.part_of("adapter", "use_peft lora_r lora_target_modules"),
    "lora_dropout": shared.LORA_DROPOUT,
    "lora_modules_to_save": shared.modules(Setting.MODULES_TO_SAVE),
    "use_dora": rows.switch(Setting.DORA),
    **shared.quantization_rows(),
    "use_bnb_nested_quant": rows.switch(Setting.NESTED_QUANT),
    **rows.lacking("LoRA on parameters of experts", "lora_target_parameters"),
    # scripts on top of TRL: alignment-handbook, open-r1, philschmid's
    "model_id": rows.text(Setting.MODEL),
    "max_seq_len": _LENGTH,
    **rows.lacking("training of chosen parameters", "spectrum_config_path", remedy=OTHER_TRAINING),
    "use_flash_attention_2": rows.turned_on({Setting.ATTENTION: "flash"}),
    "gradient_checkpointing_use_reentrant": rows.switch(Setting.REENTRANT),
    # an argument of `accelerate launch`, which TRL's command line takes from the file
    "num_processes": rows.count(Setting.GPUS),
}
_SFT: Mapping[str, rows.Row] = {
    **_COMMON,
    **rows.ignored_keys("trl", "sft"),
    "packing": rows.turned_on({Setting.PACKING: Packing.DOCUMENTS}),
    "padding_free": rows.turned_on({Setting.PACKING: Packing.PADDING_FREE}),
    **rows.part_of("packing", "packing_strategy"),
    "loss_type": rows.words(
        Setting.LOSS,
        # a product with the probability, per token, makes dft's loss
        dict.fromkeys(("nll", "chunked_nll", "dft"), "trl-tiled"),
        what="loss",
        remedy="Choose another with --loss.",
    ),
    # a key of older versions
    **rows.part_of("liger-kernel", "use_liger"),
}
_DEFAULTS: Mapping[Setting, Any] = {
    **trainer.DEFAULTS,
    Setting.SEQ: 1024,
    Setting.CHECKPOINTING: True,
    Setting.AUTOCAST: "bf16",
    # trl/trainer/model_config.py
    Setting.LORA_DROPOUT: 0.05,
    # trl/trainer/utils.py, create_model_from_path, with every version of transformers
    Setting.WEIGHTS: "float32",
}


def _finish_common(reading: Reading, values: Mapping[str, Any]) -> None:
    trainer.finish(reading, values)
    if rows.is_off(values.get("bf16", True)) or rows.is_on(values, "fp16"):
        reading.defaults[Setting.AUTOCAST] = "no"
    if not rows.is_on(values, "use_peft"):
        shared.without_adapter(reading)
        return
    rank = rows.whole_number_at(reading, "lora_r", values.get("lora_r") or 16)
    reading.set("lora_r" if "lora_r" in values else "use_peft", {Setting.RANK: rank})
    if reading.value(Setting.BITS) is not None:
        # TRL 0.26 and later cast adapters over 4-bit weights to bf16 (sft_trainer.py), earlier versions under bf16
        reading.defaults[Setting.ADAPTER_DTYPE] = "bfloat16"
        reading.defaults[Setting.NESTED_QUANT] = False
    targets = values.get("lora_target_modules")
    named = (
        targets
        if isinstance(targets, str)
        else rows.modules_at(reading, "lora_target_modules", targets)
        if targets
        else settings.PEFT_DEFAULT
    )
    # peft reads a list of one name as the name
    single = named[0] if isinstance(named, list) and named == ["all-linear"] else named
    reading.set("lora_target_modules" if targets else "use_peft", {Setting.LORA_TARGETS: single})


def _finish_sft(reading: Reading, values: Mapping[str, Any]) -> None:
    """Read what depends on several keys: precision, adapter, packing and the loss."""
    _finish_common(reading, values)
    if rows.is_on(values, "packing"):
        # only bfd, the default, turns padding_free on; wrapped rows are cut from one stream of tokens
        wrapped = Packing.PLAIN if not rows.is_on(values, "padding_free") else Packing.PADDING_FREE
        is_wrapped = values.get("packing_strategy") == "wrapped"
        reading.set("packing", {Setting.PACKING: wrapped if is_wrapped else Packing.DOCUMENTS})
    _set_loss(reading, values)


def _set_loss(reading: Reading, values: Mapping[str, Any]) -> None:
    """TRL 1.15 and later compute every loss in tiles, and liger-kernel replaces layers only (sft_trainer.py).

    They refuse liger-kernel's fused loss, so that a file that asks for it by name is for an earlier version.
    """
    details = values.get("liger_kernel_config")
    asks_for_fused = isinstance(details, Mapping) and rows.truth(details.get("fused_linear_cross_entropy") or False)
    switch_key = next((key for key in ("use_liger_kernel", "use_liger") if rows.is_on(values, key)), None)
    if switch_key is not None and asks_for_fused:
        reading.set(switch_key, {Setting.LOSS: "hf"})
        return
    reading.defaults[Setting.LOSS] = "trl-tiled"
    if switch_key is not None:
        kernels = reading.value(Setting.LIGER)
        reading.set(switch_key, {Setting.LIGER: kernels - {"flce", "ce"}, Setting.PROVIDER: "liger"})
    if reading.value(Setting.LOSS) == "trl-tiled":
        before = (
            "--liger all --provider liger --loss hf"
            if switch_key is not None
            else "--loss chunked-nll, or --loss hf for nll"
        )
        reading.assumed.append(f"the loss of TRL 1.15 and later, in tiles; for TRL 1.14 and before: {before}")


def _write_adapter(recipe: TrainingRecipe) -> Mapping[str, Any]:
    return {
        "use_peft": True,
        "lora_r": recipe.lora or recipe.qlora,
        "lora_target_modules": "all-linear",
        # TRL's default is 0.05
        "lora_dropout": recipe.lora_dropout,
        **rows.BITS[recipe.packed_bits],
    }


# TRL loads the model, and its files say in which dtype
_PRECISIONS: Mapping[Precision, Mapping[str, Any]] = {
    Precision.AMP: {"dtype": "float32", "bf16": True},
    Precision.AMP_FP16: {"dtype": "float32", "fp16": True},
    Precision.BF16_AMP: {"dtype": "bfloat16", "bf16": True},
    Precision.FP16_AMP: {"dtype": "float16", "fp16": True},
}

TRL_SFT = rows.Framework(
    name="trl-sft",
    title="TRL's SFTConfig",
    family=trainer.FAMILY,
    rows=_SFT,
    signature=trainer.SIGNATURE
    | {"dataset_name", "dataset_text_field", "max_length", "packing", "use_peft", "completion_only_loss"},
    defaults=_DEFAULTS,
    finish=_finish_sft,
    writes={
        **trainer.WRITES,
        **rows.as_read(_SFT, "seq activation_offload lora_dropout"),
        **rows.adapter(_write_adapter),
        "precision": lambda recipe: _PRECISIONS.get(recipe.precision),
        # TRL 1.15 and later have a loss of their own
        "liger": rows.liger({"use_liger_kernel": True}, "no-flce"),
    },
)


def _other(name: str, title: str, method: str, *, of: str = "") -> rows.Framework:
    """A configuration of a method that recipes do not cover; its keys, or those of the method `of`, are still read."""
    keys = rows.known_keys("trl")["methods"][of or name]

    def finish(reading: Reading, values: Mapping[str, Any]) -> None:
        _finish_common(reading, values)
        key = next((key for key in keys if key in values), name)
        reading.lack(key, method, remedy=OTHER_METHOD)

    return rows.Framework(
        name=name,
        title=title,
        family=trainer.FAMILY,
        rows={**_COMMON, **rows.part_of(method, " ".join(keys))},
        signature=trainer.SIGNATURE | set(keys),
        defaults=_DEFAULTS,
        finish=finish,
    )


TRL_DPO = _other("trl-dpo", "TRL's DPOConfig", "DPO or another preference method, with pairs of sequences")
TRL_REWARD = _other("trl-reward", "TRL's RewardConfig", "reward modeling, with a classification head")
TRL_RL = _other(
    "trl-rl", "TRL's configuration of a reinforcement method (GRPO, RLOO, KTO, …)", "reinforcement learning"
)
# chosen by name alone: their files have the keys of others
TRL_BY_NAME = tuple(
    _other(f"trl-{method.lower()}", f"TRL's {method}Config", method, of="trl-rl")
    for method in ("GRPO", "RLOO", "PPO", "KTO")
)
