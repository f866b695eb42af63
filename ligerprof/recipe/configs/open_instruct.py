"""open-instruct's YAML for its script of supervised fine-tuning."""

from collections.abc import Mapping
from typing import Any

from ligerprof.recipe.configs import rows, shared
from ligerprof.recipe.configs.settings import OTHER_METHOD, Outcome, Packing, Reading, Setting

_PREFERENCES = "DPO or another preference method, with pairs of sequences"
_TARGETS = ["q_proj", "o_proj", "v_proj", "k_proj", "gate_proj", "up_proj", "down_proj"]


def _read_clip(value: Any) -> Outcome:
    """Negative numbers switch clipping off."""
    if str(value).strip().startswith("-"):
        return rows.UNSET
    return rows.number(Setting.CLIP).read(value)


_ROWS: Mapping[str, rows.Row] = {
    **rows.ignored_keys("open-instruct"),
    "model_name_or_path": rows.text(Setting.MODEL),
    "per_device_train_batch_size": rows.count(Setting.BATCH),
    "gradient_accumulation_steps": rows.count(Setting.GRAD_ACCUM),
    "max_seq_length": rows.count(Setting.SEQ),
    "gradient_checkpointing": rows.switch(Setting.CHECKPOINTING),
    "clip_grad_norm": rows.Row(read=_read_clip),
    "packing": rows.turned_on({Setting.PACKING: Packing.PADDING_FREE}),
    "use_flash_attn": rows.sets(Setting.ATTENTION, lambda value: "flash" if rows.truth(value) else "eager"),
    **rows.part_of("adapter", "use_lora use_qlora lora_rank"),
    **rows.part_of("optimizer", "use_8bit_optimizer fused_optimizer"),
    "use_liger_kernel": rows.turned_on({Setting.LIGER: shared.LIGER_DEFAULTS, Setting.PROVIDER: "liger"}),
    **rows.lacking("another configuration of the model", "config_name additional_model_arguments"),
    **rows.parallelism(sequence="sequence_parallel_size"),
    **rows.lacking(
        _PREFERENCES,
        "beta dpo_beta loss_type dpo_loss_type gamma_beta_ratio dpo_gamma_beta_ratio dpo_label_smoothing"
        " concatenated_forward",
        remedy=OTHER_METHOD,
    ),
    **rows.left_out("the loss that balances experts", "load_balancing_loss"),
    **rows.left_out("added or resized embeddings", "add_bos", harmless=(True, False)),
    "sync_each_batch": shared.SYNC_EACH_BATCH,
    "lora_dropout": shared.LORA_DROPOUT,
}


def _finish(reading: Reading, values: Mapping[str, Any]) -> None:
    """Read what depends on several keys: the adapter and the optimizer (open_instruct/finetune.py)."""
    in_8_bits, packed = (rows.is_on(values, key) for key in ("use_8bit_optimizer", "use_qlora"))
    if packed:
        # bitsandbytes, in 8 bits or not, comes with QLoRA alone
        reading.set("use_qlora", {Setting.OPTIMIZER: "paged-adamw-8bit" if in_8_bits else "paged-adamw"})
    elif "fused_optimizer" in values and rows.is_off(values["fused_optimizer"]):
        reading.set("fused_optimizer", {Setting.OPTIMIZER: "adamw-foreach"})
    if not rows.is_on(values, "use_lora"):
        shared.without_adapter(reading)
        return
    rank = rows.whole_number_at(reading, "lora_rank", values.get("lora_rank") or 64)
    reading.set("use_lora", {Setting.RANK: rank, Setting.LORA_TARGETS: _TARGETS})
    if packed:
        reading.set("use_qlora", {Setting.BITS: 4})


OPEN_INSTRUCT = rows.Framework(
    name="open-instruct",
    title="a configuration of open-instruct",
    family="open-instruct",
    rows=_ROWS,
    signature=frozenset(
        {"with_tracking", "checkpointing_steps", "keep_last_n_checkpoints", "use_slow_tokenizer", "dataset_mixer_list"}
        | {"use_lora", "use_qlora", "dataset_mix_dir", "clip_grad_norm"}
    ),
    defaults={
        Setting.BATCH: 8,
        Setting.GRAD_ACCUM: 1,
        Setting.CLIP: 0.0,
        Setting.CHECKPOINTING: False,
        Setting.REENTRANT: False,
        Setting.WEIGHTS: "bfloat16",
        # accelerate's file or its launcher sets it
        Setting.AUTOCAST: "no",
        Setting.LORA_DROPOUT: 0.1,
        Setting.OPTIMIZER: "adamw-fused",
        Setting.ATTENTION: "flash",
    },
    finish=_finish,
)
