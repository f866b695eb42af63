"""The recipe that a tape is traced with, and a recipe with the tape of its model."""

import dataclasses
from typing import Any

from ligerprof.models import ParameterShape
from ligerprof.models.tape import Tape
from ligerprof.recipe.categories import Engine, Optimizer
from ligerprof.recipe.training import TrainingRecipe

# what a replay decides, and a trace does without
REPLAYED: dict[str, Any] = {
    "engine": Engine.TORCH,
    "gpus": 1,
    "grad_sync": None,
    "bucket_view": None,
    "optimizer": Optimizer.NONE,
    "clip": 0.0,
    "galore_rank": None,
    "fp32_embedding_states": False,
    "checkpoint_every": 1,
    "memory_limit_bytes": None,
    "host_memory_bytes": None,
    "alloc_conf": None,
    "lengths": None,
    "length_order": None,
    "pad_to_multiple_of": None,
    "packing_strategy": None,
}


def with_tape_of(recipe: TrainingRecipe, tape: Tape) -> TrainingRecipe:
    """The recipe with a traced model."""
    parameters = tuple(
        ParameterShape(name=item.name, shape=item.shape, trained=item.trained) for item in tape.parameters
    )
    spec = dataclasses.replace(recipe.spec, parameters=parameters, no_estimate_reason=None, tape=tape)
    return dataclasses.replace(recipe, model=spec)


def to_trace(recipe: TrainingRecipe, *, flat: bool = False) -> TrainingRecipe:
    """The part of a recipe that decides the passes of one micro-batch; `flat`: with its checkpointing."""
    defaults = {item.name: item.default for item in dataclasses.fields(TrainingRecipe)}
    changed: dict[str, Any] = {name: defaults[name] if value is None else value for name, value in REPLAYED.items()}
    changed["grad_accum"] = min(recipe.grad_accum, 2)
    if flat:
        changed["checkpoint_every"] = recipe.checkpoint_every
    elif recipe.lora is None and recipe.qlora is None:
        # without adapters, the passes are the same where checkpointing keeps its hands off them
        changed["checkpointing"] = False
    return dataclasses.replace(recipe, **changed)
