"""Rows that several frameworks share: dtypes, attention, optimizers, quantization, adapters and FSDP."""

from collections.abc import Mapping, Sequence
from typing import Any

from ligerprof.recipe.categories import GradSync
from ligerprof.recipe.configs import rows
from ligerprof.recipe.configs.deepspeed import DEEPSPEED_ROWS
from ligerprof.recipe.configs.settings import SIMULATED_RANKS, Ignored, Lacking, Outcome, Reading, Reason, Sets, Setting
from ligerprof.recipe.training import TrainingRecipe

EVALUATION = "evaluation"
# compute_metrics of the Trainer, without which it keeps the loss alone
METRICS = "the logits that metrics of an evaluation keep on the GPU"
# what liger-kernel replaces unless told otherwise; `glu` is SwiGLU or GeGLU, as the model has it
LIGER_DEFAULTS = frozenset({"rope", "rms", "glu", "flce"})
LIGER_NAMES: Mapping[str, str] = {
    "rope": "rope",
    "rms_norm": "rms",
    "swiglu": "glu",
    "geglu": "glu",
    "glu_activation": "glu",
    "layer_norm": "layernorm",
    "cross_entropy": "ce",
    "fused_linear_cross_entropy": "flce",
}
_DTYPES = {f"{prefix}{name}": name for name in ("float32", "bfloat16", "float16") for prefix in ("", "torch.")} | {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "auto": "checkpoint",
}
_FLASH = (
    *("flash_attention_2", "flash_attention_3", "fa2", "fa3"),
    *(f"kernels-community/{name}" for name in ("flash-attn", "flash-attn2", "flash-attn3", "vllm-flash-attn3")),
)
DTYPE = rows.words(Setting.WEIGHTS, _DTYPES, what="weights in")
ATTENTION = rows.words(
    Setting.ATTENTION,
    {"sdpa": "sdpa", "eager": "eager", "disabled": "eager", **dict.fromkeys(_FLASH, "flash")},
    what="attention",
)
OPTIMIZER = rows.words(Setting.OPTIMIZER, rows.TRAINER_OPTIMIZERS, what="optimizer")
CHECKPOINTING_KWARGS = rows.section(
    {
        "use_reentrant": rows.switch(Setting.REENTRANT),
        "every_n_layers": rows.count(Setting.CHECKPOINT_EVERY),
        **rows.lacking("checkpoints in main memory without streams (save_on_cpu)", "offload"),
        **rows.each("preserve_rng_state determinism_check debug early_stop", rows.ignored(Reason.RANDOM)),
    }
)
SYNC_EACH_BATCH = rows.turned_on({Setting.GRAD_SYNC: "every"})
# the Trainer synchronizes the last micro-batch of a step alone, unless this says otherwise (Trainer.training_step)
ACCELERATOR_CONFIG = rows.section(
    {
        "gradient_accumulation_kwargs": rows.section(
            {
                "sync_each_batch": SYNC_EACH_BATCH,
                **rows.each("adjust_scheduler sync_with_dataloader", rows.ignored(Reason.SCHEDULE)),
                **rows.lacking(
                    "accelerate's own accumulation",
                    "num_steps",
                    harmless=(1,),
                    remedy="Set gradient_accumulation_steps in its place.",
                ),
            }
        )
    },
    ignored="transformers.accelerator_config",
)


def write_grad_sync(recipe: TrainingRecipe) -> Mapping[str, Any]:
    """The key of the Trainer's arguments for `--grad-sync`."""
    return {"accelerator_config.gradient_accumulation_kwargs": {"sync_each_batch": recipe.grad_sync is GradSync.EVERY}}


def write_every(recipe: TrainingRecipe) -> Mapping[str, Any]:
    """The key of the Trainer's arguments for `--checkpoint-every`, which transformers 5.23 and later know."""
    kwargs = {"use_reentrant": recipe.reentrant, "every_n_layers": recipe.checkpoint_every}
    return {"gradient_checkpointing_kwargs": kwargs}


DEEPSPEED_SECTION = rows.section(DEEPSPEED_ROWS, read=rows.file_name("deepspeed"))


def _dropout(value: Any) -> float:
    rate = 0.0 if rows.is_off(value) else rows.real_number(value)
    if not 0 <= rate < 1:
        raise rows.BadValueError("not a probability of at least 0 and below 1")
    return rate


LORA_DROPOUT = rows.sets(Setting.LORA_DROPOUT, _dropout)
EVALUATION_STRATEGY = rows.Row(read=rows.unless_off(lambda _: Sets(values={Setting.EVALUATES: True})))
FSDP_SWITCH = rows.Row(read=rows.unless_off(lambda _: rows.noted("FSDP")))


def without_adapter(reading: Reading) -> None:
    """Drop what a file says about adapters that it does not train."""
    for setting in (Setting.LORA_DROPOUT, Setting.DORA, Setting.MODULES_TO_SAVE, Setting.NESTED_QUANT):
        if (found := reading.settings.pop(setting, None)) is not None:
            reading.read.pop(found.key, None)
            reading.ignored[found.key] = Reason.OTHER_METHOD


def modules(setting: Setting) -> rows.Row:
    """Names of modules."""
    return rows.Row(read=lambda value: Sets(values={setting: rows.module_names(value)}) if value else rows.UNSET)


def liger_names(switches: Mapping[str, Any], chosen: frozenset[str] = frozenset()) -> frozenset[str]:
    """The kernels that liger-kernel's switches choose, starting from `chosen`; None switches nothing."""
    names = set(chosen)
    for key, value in switches.items():
        name = LIGER_NAMES.get(key)
        if name is not None and value is not None:
            (names.add if rows.truth(value) else names.discard)(name)
    # both replace the loss; liger-kernel then uses the fused one
    return frozenset(names - {"ce"} if "flce" in names else names)


def quantization_rows() -> dict[str, rows.Row]:
    """Switches of bitsandbytes and the details of its 4-bit format."""
    return {
        "load_in_4bit": rows.turned_on({Setting.BITS: 4}),
        "load_in_8bit": rows.turned_on({Setting.BITS: 8}),
        "bnb_4bit_quant_type": rows.words(
            Setting.BITS,
            {"nf4": Ignored(reason=Reason.NUMBER), "fp4": Ignored(reason=Reason.NUMBER)},
            what="the 4-bit type",
        ),
        "bnb_4bit_compute_dtype": rows.ignored(Reason.NUMBER),
        **rows.lacking("another storage dtype of 4-bit weights", "bnb_4bit_quant_storage", harmless=("uint8",)),
    }


# names and numbers of torch.distributed.fsdp.StateDictType
_WHOLE, _SHARDS = ("FULL_STATE_DICT", "1"), ("LOCAL_STATE_DICT", "SHARDED_STATE_DICT", "2", "3")
_STRATEGY_KEYS = ("fsdp_sharding_strategy", "sharding_strategy")
# accelerate's numbers are those of the order, from 1 on
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
_RESHARDS = {"full_shard": True, "hybrid_shard": True, "shard_grad_op": False, "hybrid_shard_zero2": False}


def _read_reshard(value: Any) -> Outcome:
    word = str(value).strip().lower()
    return Sets(values={Setting.RESHARD: _RESHARDS[word] if word in _RESHARDS else rows.truth(value)})


def _read_prefetch(value: Any) -> Outcome:
    """Accelerate gathers nothing in advance where no key says so."""
    word = _word(value, _PREFETCHES)
    if word not in _PREFETCHES:
        raise rows.BadValueError("not BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH")
    chosen = {"BACKWARD_PRE": "pre", "BACKWARD_POST": "post"}.get(word, "none")
    return Sets(values={Setting.BACKWARD_PREFETCH: chosen}, words="part of FSDP")


def _word(value: Any, words_: Sequence[str]) -> str:
    """A word that may be given as its number, from 1 on."""
    word = str(value).strip().upper()
    return words_[int(word) - 1] if word.isdigit() and 0 < int(word) <= len(words_) else word


def _read_policy(value: Any) -> Outcome:
    if str(value).strip().upper() == "SIZE_BASED_WRAP":
        return Lacking(what="FSDP's wrapping of modules by size")
    return rows.noted("part of FSDP")


def _is_whole(kind: Any) -> bool:
    word = str(kind).strip().upper()
    if word not in (*_WHOLE, *_SHARDS):
        raise rows.BadValueError("not FULL_STATE_DICT, SHARDED_STATE_DICT or LOCAL_STATE_DICT")
    return word in _WHOLE


_STATE_DICT = rows.Row(
    read=rows.unless_off(lambda value: rows.noted(f"saves {'the model whole' if _is_whole(value) else 'shards'}"))
)


# keys for checkpoints, and axolotl's for the trained model
_STATE_DICT_KEYS = ("state_dict_type", "final_state_dict_type")
_KEYS: Mapping[str, rows.Row] = {
    **rows.ignored_keys("fsdp"),
    "version": rows.Row(read=lambda value: rows.noted(f"version {rows.whole_number(value, 1)} of FSDP")),
    "reshard_after_forward": rows.Row(read=_read_reshard),
    **rows.each("offload_params cpu_offload", rows.turned_on({Setting.OFFLOAD: "all"})),
    "activation_checkpointing": rows.turned_on({Setting.CHECKPOINTING: True, Setting.REENTRANT: False}),
    **rows.part_of("part of FSDP", "transformer_layer_cls_to_wrap sharding_strategy limit_all_gathers use_orig_params"),
    **rows.each("backward_prefetch backward_prefetch_policy", rows.Row(read=_read_prefetch)),
    **rows.left_out("one layer more that the forward pass gathers in advance", "forward_prefetch"),
    "auto_wrap_policy": rows.Row(read=_read_policy),
    **rows.lacking("FSDP with ignored modules", "ignored_modules"),
    **rows.lacking("a mixed-precision policy for FSDP", "mixed_precision_policy"),
    **rows.lacking("checkpoints in host memory", "activation_checkpointing_offload activation_cpu_offload"),
    **rows.lacking("torch_xla", "xla xla_fsdp_v2 xla_fsdp_settings xla_fsdp_grad_ckpt"),
    **dict.fromkeys(_STATE_DICT_KEYS, _STATE_DICT),
}
FSDP_ROWS: Mapping[str, rows.Row] = {**_KEYS, **{f"fsdp_{name}": row for name, row in _KEYS.items()}}


FSDP1_REMEDY = (
    f"{SIMULATED_RANKS} Or set fsdp_version: 2 in the file, or give --engine fsdp2 to count version 2 in its place."
)


def set_fsdp(reading: Reading, key: str, section: Any, *, version: Any, outer: Any = None, legacy: str = "") -> None:
    """Choose FSDP as the engine of a file.

    Args:
        key: the key that switches FSDP on.
        section: the value of `fsdp_config`.
        version: the framework's default version.
        outer: a version that the file has outside the section.
        legacy: words of the Trainer's `fsdp`, of which one may be the strategy.
    """
    inner = section if isinstance(section, Mapping) else {}
    number = inner.get("fsdp_version") or inner.get("version") or outer or version
    # accelerate gathers and reduces in the same dtype (FullyShardedDataParallelPlugin.set_mixed_precision)
    settings = {Setting.WRAP: "accelerate", Setting.REDUCE_DTYPE: "bfloat16"}
    is_newer = str(number) in ("2", "2.0")
    reading.set(key, {Setting.ENGINE: "fsdp2" if is_newer else "fsdp1", **settings})
    if not is_newer:
        _set_version_1(reading, key, inner, legacy)
    kinds = [inner.get(f"{prefix}{name}") for prefix in ("", "fsdp_") for name in _STATE_DICT_KEYS]
    if given := [kind for kind in kinds if not rows.is_off(kind)]:
        reading.imply(key, {Setting.SAVE_WHOLE: any(map(_is_whole, given))})


def _set_version_1(reading: Reading, key: str, inner: Mapping[str, Any], legacy: str) -> None:
    """The strategy, of the keys of either version or of the Trainer's words, and what is wrapped."""
    both = (*_STRATEGY_KEYS, "fsdp_reshard_after_forward", "reshard_after_forward")
    given = [inner[name] for name in both if inner.get(name) is not None]
    words_ = [word for word in legacy.upper().split() if word in _STRATEGIES]
    strategy = _word((*given, *words_, "FULL_SHARD")[0], _STRATEGIES)
    if strategy in _STRATEGIES[2:]:
        reading.lack(key, f"FSDP version 1 with {strategy}", setting=Setting.ENGINE, remedy=FSDP1_REMEDY)
    reading.imply(key, {Setting.RESHARD: strategy != "SHARD_GRAD_OP"})
    policies = [inner.get(name) for name in ("fsdp_auto_wrap_policy", "auto_wrap_policy")]
    if next((str(each).upper() for each in policies if each is not None), "") == "NO_WRAP":
        what = "FSDP version 1 that gathers the whole model at once (without fsdp_auto_wrap_policy)"
        reading.lack(key, what, setting=Setting.ENGINE, remedy=FSDP1_REMEDY)
    if Setting.BACKWARD_PREFETCH not in reading.settings:
        reading.imply(key, {Setting.BACKWARD_PREFETCH: "none"})


# the file that `fsdp_config` of TrainingArguments names
FSDP = rows.Framework(
    name="fsdp",
    title="the Trainer's settings of FSDP",
    rows=FSDP_ROWS,
    signature=frozenset(
        {"transformer_layer_cls_to_wrap", "fsdp_transformer_layer_cls_to_wrap", "fsdp_version", "auto_wrap_policy"}
        | {"reshard_after_forward", "fsdp_reshard_after_forward", "backward_prefetch", "cpu_ram_efficient_loading"}
    ),
    is_complete=False,
    finish=lambda reading, values: set_fsdp(reading, next(iter(values)), values, version=2),
)
