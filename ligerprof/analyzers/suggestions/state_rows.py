"""Suggestions for weights and optimizer states: their precision, their place, and which of them train."""

import dataclasses
from typing import TYPE_CHECKING

from ligerprof.analyzers.suggestions.case import Case
from ligerprof.analyzers.suggestions.kept_edits import known_recipe
from ligerprof.analyzers.suggestions.program import Framework
from ligerprof.analyzers.suggestions.row import TRAINERS, YAML, Row, for_each, has, knows_model
from ligerprof.analyzers.suggestions.state_edits import (
    ADAPTER_DROPOUT,
    LORA_RANK,
    computes_lora,
    parameter_width,
    with_eight_bit_states,
    with_half_precision_weights,
    with_lora,
    with_paged_states,
    without_adapter_dropout,
)
from ligerprof.analyzers.suggestions.suggestion import Basis, Cost
from ligerprof.recipe.categories import Optimizer, Precision
from ligerprof.roles import Role

if TYPE_CHECKING:
    from ligerprof.recipe.training import TrainingRecipe

_ADAM = r"torch/optim/adamw?\.py:\w+$"
_LOW_BIT = r"(?:^|/)(?:bitsandbytes|torchao|galore_torch)/"
_WHOLE_STATES = (None, Framework.DDP)


def _has_adam(case: Case) -> bool:
    """Whether torch's Adam updates whole tensors that no engine has sharded."""
    program = case.program
    whole = program.engine in _WHOLE_STATES and not program.is_compiled
    return whole and program.has_call(_ADAM) and not program.has_file(_LOW_BIT)


def _autocasts_fp32(case: Case) -> bool:
    program = case.program
    if program.engine not in _WHOLE_STATES or program.has_adapters or program.has_file(_LOW_BIT):
        return False
    return case.trains_model and has(Role.WEIGHT_CASTS)(case)


def _can_add_adapters(case: Case) -> bool:
    program = case.program
    if program.engine is not None or program.has_adapters or program.is_compiled:
        return False
    return case.trains_model and knows_model(case) and parameter_width(case) is not None


def _bf16_weights(recipe: "TrainingRecipe") -> "TrainingRecipe | None":
    return dataclasses.replace(recipe, precision=Precision.BF16) if recipe.precision is Precision.AMP else None


def _paged(recipe: "TrainingRecipe") -> "TrainingRecipe":
    return dataclasses.replace(recipe, optimizer=Optimizer.PAGED_ADAMW)


def _eight_bit(recipe: "TrainingRecipe") -> "TrainingRecipe":
    return dataclasses.replace(recipe, optimizer=Optimizer.ADAMW_8BIT)


def _no_adapter_dropout(recipe: "TrainingRecipe") -> "TrainingRecipe | None":
    return dataclasses.replace(recipe, lora_dropout=0.0) if recipe.lora_dropout else None


def _lora(recipe: "TrainingRecipe") -> "TrainingRecipe | None":
    return None if recipe.lora or recipe.qlora else dataclasses.replace(recipe, lora=LORA_RANK)


STATE_ROWS: tuple[Row, ...] = (
    Row(
        name="paged-optimizer",
        change="optimizer states in memory that pages between GPU and host",
        cost=Cost.TIME,
        cost_reason="the same results; states that do not fit cross PCIe every step",
        without=(Role.OPTIMIZER_STATES, Role.OPTIMIZER_TEMPORARIES),
        applies=lambda case: _has_adam(case) and has(Role.OPTIMIZER_STATES)(case),
        edit=with_paged_states,
        how={
            **for_each(TRAINERS, 'optim="paged_adamw_32bit",'),
            Framework.AXOLOTL: ("optimizer: paged_adamw_32bit",),
            Framework.LLAMA_FACTORY: ("optim: paged_adamw_32bit",),
            Framework.LIGERPROF: ("--optimizer paged-adamw",),
            Framework.TORCH: ("optimizer = bitsandbytes.optim.PagedAdamW32bit(...)",),
        },
        recipe=_paged,
    ),
    Row(
        name="8-bit-optimizer",
        change="Adam with moments in 8 bits",
        cost=Cost.TRAINING,
        cost_reason="moments are rounded to 8 bits in each step",
        without=(Role.OPTIMIZER_STATES, Role.OPTIMIZER_TEMPORARIES),
        applies=lambda case: _has_adam(case) and has(Role.OPTIMIZER_STATES)(case),
        edit=with_eight_bit_states,
        how={
            **for_each(TRAINERS, 'optim="adamw_bnb_8bit",'),
            Framework.AXOLOTL: ("optimizer: adamw_bnb_8bit",),
            Framework.LLAMA_FACTORY: ("optim: adamw_bnb_8bit",),
            Framework.LIGERPROF: ("--optimizer adamw-8bit",),
            Framework.TORCH: ("optimizer = bitsandbytes.optim.AdamW8bit(...)  # or Adam8bit",),
        },
        recipe=_eight_bit,
    ),
    Row(
        name="lora-dropout",
        change="LoRA adapters without dropout, which keep no masks",
        cost=Cost.TRAINING,
        cost_reason="adapters lose this regularization; peft's default has none",
        without=(Role.ACTIVATIONS,),
        applies=lambda case: len(case.blocks_from(ADAPTER_DROPOUT)) > 0,
        edit=without_adapter_dropout,
        basis=Basis.AT_LEAST,
        how={
            Framework.TRL: ("# of LoraConfig, or of TRL's ModelConfig:", "lora_dropout=0.0,"),
            **for_each(YAML, "lora_dropout: 0"),
            Framework.LIGERPROF: ("--lora-dropout 0",),
            Framework.TORCH: ("LoraConfig(..., lora_dropout=0.0)",),
        },
        recipe=_no_adapter_dropout,
    ),
    Row(
        name="bf16-weights",
        change="weights, gradients and optimizer states in bf16 instead of fp32",
        cost=Cost.TRAINING,
        cost_reason="updates below bf16's resolution are lost",
        without=(Role.PARAMETERS, Role.GRADIENTS, Role.OPTIMIZER_STATES, Role.WEIGHT_CASTS),
        applies=_autocasts_fp32,
        edit=with_half_precision_weights,
        basis=Basis.ESTIMATED,
        is_whole=lambda case: known_recipe(case) is not None,
        how={
            Framework.LLAMA_FACTORY: ("pure_bf16: true  # instead of bf16: true",),
            Framework.LIGHTNING: ('Trainer(..., precision="bf16-true")',),
            Framework.LIGERPROF: ("--precision bf16",),
            Framework.MODEL: ("model = AutoModel….from_pretrained(..., dtype=torch.bfloat16)",),
            Framework.TORCH: ("model = model.to(torch.bfloat16)  # before the optimizer",),
        },
        recipe=_bf16_weights,
    ),
    Row(
        name="lora",
        change=f"LoRA adapters of rank {LORA_RANK} instead of all weights",
        cost=Cost.TRAINING,
        cost_reason="only the adapters of linear layers learn",
        without=(Role.GRADIENTS, Role.OPTIMIZER_STATES, Role.OPTIMIZER_TEMPORARIES),
        applies=_can_add_adapters,
        edit=with_lora,
        basis=Basis.AT_LEAST,
        is_whole=computes_lora,
        how={
            Framework.TRL: (
                "# of the trainer, not of its config:",
                f'peft_config=LoraConfig(r={LORA_RANK}, target_modules="all-linear"),',
            ),
            Framework.AXOLOTL: ("adapter: lora", f"lora_r: {LORA_RANK}", "lora_target_linear: true"),
            Framework.LLAMA_FACTORY: ("finetuning_type: lora", f"lora_rank: {LORA_RANK}", "lora_target: all"),
            Framework.LIGERPROF: (f"--lora {LORA_RANK}",),
            Framework.MODEL: (
                "from peft import LoraConfig, get_peft_model",
                f'adapters = LoraConfig(r={LORA_RANK}, target_modules="all-linear")',
                "model = get_peft_model(model, adapters)  # before the optimizer",
            ),
        },
        recipe=_lora,
    ),
)
