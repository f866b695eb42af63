"""How each framework's file spells the options of a recipe: the keys for a value, by option."""

from collections.abc import Callable, Mapping
from typing import Any

from ligerprof.kernels.selection import select_kernels
from ligerprof.recipe.categories import Engine, Optimizer, Precision
from ligerprof.recipe.configs.optimizers import OPTIMIZERS
from ligerprof.recipe.training import TrainingRecipe

# the keys of a framework for a value of a recipe, or None if it has none for that value; a dot separates a section
# from its key
Spelling = Callable[[TrainingRecipe], Mapping[str, Any] | None]
TITAN_FUNCTION = "torchtitan function"
# frameworks whose files are a whole training run, without a program of the user's
SELF_CONTAINED = frozenset({"trl-sft", "axolotl", "llama-factory", "torchtitan"})


def _spelled(key: str, name: str) -> Spelling:
    return lambda recipe: {key: getattr(recipe, name)}


def _optimizer(key: str) -> Spelling:
    def spell(recipe: TrainingRecipe) -> Mapping[str, Any] | None:
        names = [name for name, word in OPTIMIZERS.items() if word == recipe.optimizer]
        return {key: names[0]} if names else None

    return spell


def _kernels(keys: Mapping[str, Any], kernels: str = "all", fused_loss: Mapping[str, Any] | None = None) -> Spelling:
    """The switch of liger-kernel, which selects this set of kernels, and that of its fused loss alone."""

    def spell(recipe: TrainingRecipe) -> Mapping[str, Any] | None:
        found, switched = set(recipe.kernels), set(select_kernels(kernels, recipe.spec))
        if found == {"flce"} and found != switched:
            return fused_loss
        # the file may have switched on more by itself
        return keys if switched and switched <= found else None

    return spell


def _amp(recipe: TrainingRecipe) -> Mapping[str, Any] | None:
    return {Precision.AMP: {"bf16": True}, Precision.AMP_FP16: {"fp16": True}}.get(recipe.precision)


# TRL loads the model, and its files say in which dtype
_TRL_PRECISIONS: Mapping[Precision, Mapping[str, Any]] = {
    Precision.AMP: {"dtype": "float32", "bf16": True},
    Precision.AMP_FP16: {"dtype": "float32", "fp16": True},
    Precision.BF16_AMP: {"dtype": "bfloat16", "bf16": True},
    Precision.FP16_AMP: {"dtype": "float16", "fp16": True},
}


# switches of bitsandbytes; both at once are an error
_BITS: Mapping[int | None, Mapping[str, bool]] = {
    None: {},
    4: {"load_in_4bit": True, "load_in_8bit": False},
    8: {"load_in_4bit": False, "load_in_8bit": True},
}


def _trl_adapter(recipe: TrainingRecipe) -> Mapping[str, Any] | None:
    return {
        "use_peft": True,
        "lora_r": recipe.lora or recipe.qlora,
        "lora_target_modules": "all-linear",
        # TRL's default is 0.05
        "lora_dropout": recipe.lora_dropout,
        **_BITS[recipe.packed_bits],
    }


def _axolotl_adapter(recipe: TrainingRecipe) -> Mapping[str, Any] | None:
    return {
        "adapter": "qlora" if recipe.qlora else "lora",
        "lora_r": recipe.lora or recipe.qlora,
        "lora_target_linear": True,
        **_BITS[recipe.packed_bits],
    }


def _llama_factory_adapter(recipe: TrainingRecipe) -> Mapping[str, Any] | None:
    return {
        "finetuning_type": "lora",
        "lora_rank": recipe.lora or recipe.qlora,
        "lora_target": "all",
        **({} if recipe.packed_bits is None else {"quantization_bit": recipe.packed_bits}),
    }


def _adapter(spelling: Spelling) -> dict[str, Spelling]:
    """The same keys for LoRA, QLoRA and their weights; a recipe that leaves LoRA for QLoRA changes both."""
    adapter = dict.fromkeys(
        ("lora", "qlora", "quantization"), lambda recipe: spelling(recipe) if recipe.lora or recipe.qlora else None
    )
    return {**adapter, "lora_dropout": _spelled("lora_dropout", "lora_dropout")}


_TRAINER: Mapping[str, Spelling] = {
    "batch": _spelled("per_device_train_batch_size", "batch"),
    "grad_accum": _spelled("gradient_accumulation_steps", "grad_accum"),
    "checkpointing": _spelled("gradient_checkpointing", "checkpointing"),
    "optimizer": _optimizer("optim"),
    "precision": _amp,
    "liger": _kernels(
        {"use_liger_kernel": True},
        fused_loss={
            "use_liger_kernel": True,
            "liger_kernel_config": {
                "fused_linear_cross_entropy": True,
                **dict.fromkeys(("cross_entropy", "rope", "rms_norm", "swiglu", "geglu", "layer_norm"), False),
            },
        },
    ),
}


def _launched(key: str, name: str) -> Spelling:
    """A key of accelerate's files, which only DeepSpeed reads: elsewhere the program passes it to Accelerator."""
    return lambda recipe: (
        {f"deepspeed_config.{key}": getattr(recipe, name)} if recipe.engine is Engine.DEEPSPEED else None
    )


_LIGER_PLUGIN = "axolotl.integrations.liger.LigerPlugin"
_AXOLOTL: Mapping[str, Spelling] = {
    **_adapter(_axolotl_adapter),
    "batch": _spelled("micro_batch_size", "batch"),
    "grad_accum": _spelled("gradient_accumulation_steps", "grad_accum"),
    "seq": _spelled("sequence_len", "seq"),
    "checkpointing": _spelled("gradient_checkpointing", "checkpointing"),
    "selective": lambda recipe: {"selective_checkpointing": False} if recipe.selective is None else None,
    "optimizer": _optimizer("optimizer"),
    "liger": _kernels(
        {
            "plugins": [_LIGER_PLUGIN],
            "liger_rope": True,
            "liger_rms_norm": True,
            "liger_glu_activation": True,
            "liger_fused_linear_cross_entropy": True,
        },
        fused_loss={"plugins": [_LIGER_PLUGIN], "liger_fused_linear_cross_entropy": True},
    ),
}
_MIXED = {Precision.AMP: "bf16", Precision.AMP_FP16: "fp16", Precision.MIXED: "bf16"}
_TITAN: Mapping[str, Spelling] = {
    "precision": lambda recipe: (
        {"training.mixed_precision_param": "bfloat16"} if recipe.precision in (Precision.AMP, Precision.MIXED) else None
    ),
}
_TITAN_ADAMW = {Optimizer.ADAMW_FUSED: "fused", Optimizer.ADAMW_FOREACH: "foreach", Optimizer.ADAMW: "for-loop"}


def _titan_checkpointing(recipe: TrainingRecipe) -> Mapping[str, Any] | None:
    if recipe.selective is not None or recipe.checkpoint_every > 1:
        return None
    return {"activation_checkpoint.mode": "full" if recipe.checkpointing else "none"}


def _titan_class(recipe: TrainingRecipe) -> Mapping[str, Any] | None:
    plain = recipe.selective is None and recipe.checkpoint_every == 1
    return {"activation_checkpoint": "FullAC" if recipe.checkpointing else None} if plain else None


def _titan_tokens(recipe: TrainingRecipe) -> Mapping[str, Any]:
    return {"training.num_tokens_per_microbatch_per_dp_rank": recipe.batch * recipe.seq}


SPELLINGS: Mapping[str, Mapping[str, Spelling]] = {
    "transformers": _TRAINER,
    # TRL 1.15 and later have a loss of their own
    "trl-sft": {
        **_TRAINER,
        **_adapter(_trl_adapter),
        "precision": lambda recipe: _TRL_PRECISIONS.get(recipe.precision),
        "liger": _kernels({"use_liger_kernel": True}, "no-flce"),
        "seq": _spelled("max_length", "seq"),
    },
    "axolotl": _AXOLOTL,
    "llama-factory": {
        **_TRAINER,
        **_adapter(_llama_factory_adapter),
        "checkpointing": lambda recipe: {"disable_gradient_checkpointing": not recipe.checkpointing},
        "liger": _kernels({"enable_liger_kernel": True}),
        "seq": _spelled("cutoff_len", "seq"),
    },
    "accelerate": {
        "grad_accum": _launched("gradient_accumulation_steps", "grad_accum"),
        "clip": _launched("gradient_clipping", "clip"),
        "precision": lambda recipe: (
            {"mixed_precision": _MIXED[recipe.precision]} if recipe.precision in _MIXED else None
        ),
    },
    "torchtitan": {
        **_TITAN,
        "batch": _spelled("training.local_batch_size", "batch"),
        "seq": _spelled("training.seq_len", "seq"),
        "grad_accum": lambda recipe: {"training.global_batch_size": recipe.batch * recipe.grad_accum * recipe.gpus},
        "checkpointing": _titan_checkpointing,
        "checkpoint_every": _titan_checkpointing,
        "selective": _titan_checkpointing,
        "optimizer": lambda recipe: (
            {"optimizer.implementation": _TITAN_ADAMW[recipe.optimizer]} if recipe.optimizer in _TITAN_ADAMW else None
        ),
    },
    # versions after 0.2
    TITAN_FUNCTION: {
        **_TITAN,
        "batch": _titan_tokens,
        "seq": lambda recipe: {"training.max_context_length": recipe.seq, **_titan_tokens(recipe)},
        "grad_accum": lambda recipe: {
            "training.num_tokens_per_train_step": recipe.batch * recipe.seq * recipe.grad_accum * recipe.gpus
        },
        **dict.fromkeys(("checkpointing", "selective"), _titan_class),
    },
    # its own file, next to one of another framework or of none
    "deepspeed": {},
}
