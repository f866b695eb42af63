"""Rows that several frameworks share: dtypes, attention, optimizers, quantization and adapters."""

from collections.abc import Mapping
from typing import Any

from ligerprof.errors import RecipeError
from ligerprof.recipe.configs.deepspeed import DEEPSPEED_ROWS
from ligerprof.recipe.configs.optimizers import TRAINER_OPTIMIZERS
from ligerprof.recipe.configs.rows import (
    BadValueError,
    Row,
    count,
    explain_bad,
    file_name,
    ignored,
    is_off,
    lacking,
    real_number,
    section,
    switch,
    truth,
    turned_on,
    whole_number,
    words,
)
from ligerprof.recipe.configs.settings import Ignored, Outcome, Reading, Reason, Sets, Setting

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
_DTYPES = {
    **{name: name for name in ("float32", "bfloat16", "float16")},
    **{f"torch.{name}": name for name in ("float32", "bfloat16", "float16")},
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "auto": "checkpoint",
}
_FLASH = (
    "flash_attention_2",
    "flash_attention_3",
    "fa2",
    "fa3",
    *(f"kernels-community/{name}" for name in ("flash-attn", "flash-attn2", "flash-attn3", "vllm-flash-attn3")),
)
DTYPE = words(Setting.WEIGHTS, _DTYPES, what="weights in")
ATTENTION = words(
    Setting.ATTENTION,
    {"sdpa": "sdpa", "eager": "eager", "disabled": "eager", **dict.fromkeys(_FLASH, "flash")},
    what="attention",
)
OPTIMIZER = words(Setting.OPTIMIZER, TRAINER_OPTIMIZERS, what="optimizer")
CHECKPOINTING_KWARGS = section(
    {
        "use_reentrant": switch(Setting.REENTRANT),
        "every_n_layers": count(Setting.CHECKPOINT_EVERY),
        **lacking("checkpoints in main memory without streams (save_on_cpu)", "offload"),
        **dict.fromkeys(("preserve_rng_state", "determinism_check", "debug", "early_stop"), ignored(Reason.RANDOM)),
    }
)
DEEPSPEED_SECTION = section(DEEPSPEED_ROWS, read=file_name("deepspeed"))


def _read_dropout(value: Any) -> Outcome:
    rate = 0.0 if is_off(value) else real_number(value)
    if not 0 <= rate < 1:
        raise BadValueError("not a probability of at least 0 and below 1")
    return Sets(values={Setting.LORA_DROPOUT: rate})


LORA_DROPOUT = Row(read=_read_dropout, sets=Setting.LORA_DROPOUT)


def _read_strategy(value: Any) -> Outcome:
    return Ignored(reason=Reason.UNSET) if is_off(value) else Sets(values={Setting.EVALUATES: True})


EVALUATION_STRATEGY = Row(read=_read_strategy)


def _read_fsdp(value: Any) -> Outcome:
    return Ignored(reason=Reason.UNSET) if is_off(value) else Sets(values={}, words="FSDP")


FSDP_SWITCH = Row(read=_read_fsdp)


def module_names(value: Any) -> Any:
    """Names of modules from a list or text; raises BadValueError for anything else."""
    if isinstance(value, str):
        return [name.strip() for name in value.split(",") if name.strip()]
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return value
    raise BadValueError("not a list of module names")


def modules_at(reading: Reading, key: str, value: Any) -> Any:
    """Names of modules under a key that is read after the table's rows; raises RecipeError for anything else."""
    try:
        return module_names(value)
    except BadValueError as problem:
        raise RecipeError(explain_bad(reading.file, key, value, problem)) from None


def whole_number_at(reading: Reading, key: str, value: Any, least: int = 1) -> int:
    """A whole number under a key that is read after the table's rows; raises RecipeError for anything else."""
    try:
        return whole_number(value, least)
    except BadValueError as problem:
        raise RecipeError(explain_bad(reading.file, key, value, problem)) from None


def without_adapter(reading: Reading) -> None:
    """Drop what a file says about adapters that it does not train."""
    for setting in (Setting.LORA_DROPOUT, Setting.DORA, Setting.MODULES_TO_SAVE, Setting.NESTED_QUANT):
        if (found := reading.settings.pop(setting, None)) is not None:
            reading.read.pop(found.key, None)
            reading.ignored[found.key] = Reason.OTHER_METHOD


def modules(setting: Setting) -> Row:
    """Names of modules."""
    return Row(
        read=lambda value: Sets(values={setting: module_names(value)}) if value else Ignored(reason=Reason.UNSET)
    )


def liger_names(switches: Mapping[str, Any], chosen: frozenset[str] = frozenset()) -> frozenset[str]:
    """The kernels that liger-kernel's switches choose, starting from `chosen`; None switches nothing."""
    names = set(chosen)
    for key, value in switches.items():
        name = LIGER_NAMES.get(key)
        if name is not None and value is not None:
            (names.add if truth(value) else names.discard)(name)
    # both replace the loss; liger-kernel then uses the fused one
    return frozenset(names - {"ce"} if "flce" in names else names)


def quantization_rows() -> dict[str, Row]:
    """Switches of bitsandbytes and the details of its 4-bit format."""
    return {
        "load_in_4bit": turned_on({Setting.BITS: 4}),
        "load_in_8bit": turned_on({Setting.BITS: 8}),
        "bnb_4bit_quant_type": words(
            Setting.BITS,
            {"nf4": Ignored(reason=Reason.NUMBER), "fp4": Ignored(reason=Reason.NUMBER)},
            what="the 4-bit type",
        ),
        "bnb_4bit_compute_dtype": ignored(Reason.NUMBER),
        **lacking("another storage dtype of 4-bit weights", "bnb_4bit_quant_storage", harmless=("uint8",)),
    }
