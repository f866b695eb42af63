"""The recipe that a tape is traced with, and a recipe with the tape of its model."""

import dataclasses
from typing import Any

from ligerprof.models import ParameterShape
from ligerprof.models.tape import Tape
from ligerprof.recipe.categories import Optimizer, Precision
from ligerprof.recipe.options import Group, options_of
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.recipe.training_options import TrainingOptions
from ligerprof.words import Word

# what a replay decides, and a trace does without
REPLAYED: dict[str, Any] = {
    **{name: None for name, option in options_of(TrainingOptions).items() if option.group is Group.SEVERAL_GPUS},
    "optimizer": Optimizer.NONE,
    "clip": 0.0,
    "galore_rank": None,
    "fp32_embedding_states": False,
    "checkpoint_every": 1,
    "memory_limit_bytes": None,
    "host_memory_bytes": None,
    "eval_batch": None,
    "eval_follows_batch": None,
    "alloc_conf": None,
    "lengths": None,
    "length_order": None,
    "pad_to_multiple_of": None,
    "packing_strategy": None,
}

# where an engine keeps fp32 weights, the passes read 16-bit ones
_PASSES_IN = {Precision.MIXED: Precision.BF16, Precision.MIXED_FP16: Precision.FP16}


class Way(Word):
    """What a tape is traced from.

    The passes in units, without checkpointing, which the replay rewrites; flat, in the order in which they run, with
    the recipe's checkpointing; or the forward pass of an evaluation.
    """

    UNITS = "units"
    FLAT = "flat"
    EVALUATION = "evaluation"


def with_tape_of(recipe: TrainingRecipe, tape: Tape, evaluation: Tape | None = None) -> TrainingRecipe:
    """The recipe with a traced model."""
    parameters = tuple(
        ParameterShape(name=item.name, shape=item.shape, trained=item.trained) for item in tape.parameters
    )
    spec = dataclasses.replace(
        recipe.spec, parameters=parameters, no_estimate_reason=None, tape=tape, evaluation_tape=evaluation
    )
    return dataclasses.replace(recipe, model=spec)


def to_trace(recipe: TrainingRecipe, way: Way = Way.UNITS) -> TrainingRecipe:
    """The part of a recipe that decides the passes of one micro-batch, or its evaluation."""
    defaults = {item.name: item.default for item in dataclasses.fields(TrainingRecipe)}
    changed: dict[str, Any] = {name: defaults[name] if value is None else value for name, value in REPLAYED.items()}
    changed["precision"] = _PASSES_IN.get(recipe.precision, recipe.precision)
    changed["grad_accum"] = min(recipe.grad_accum, 2)
    if way is Way.EVALUATION and recipe.eval_batch is not None:
        changed["batch"] = recipe.eval_batch
    if way is not Way.UNITS:
        changed["checkpoint_every"] = recipe.checkpoint_every
    elif recipe.lora is None and recipe.qlora is None:
        # without adapters, the passes are the same where checkpointing keeps its hands off them
        changed["checkpointing"] = False
    return dataclasses.replace(recipe, **changed)
