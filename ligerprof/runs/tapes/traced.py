"""Give a recipe whose architecture has no row the tape of its model: from the user's cache, or traced now."""

import dataclasses
from collections.abc import Callable
from typing import Any

from ligerprof.errors import UnsupportedError
from ligerprof.models import ParameterShape
from ligerprof.models.tape import Tape
from ligerprof.models.tape_cache import cache_key, find_tape, keep_tape
from ligerprof.recipe.categories import Engine, Optimizer
from ligerprof.recipe.conflicts import require_packages, require_supported
from ligerprof.recipe.lengths import at_longest
from ligerprof.recipe.options import options_of
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.recipe.training_options import TrainingOptions
from ligerprof.runs.versions import package_versions

# what a replay decides, and a trace does without
_REPLAYED: dict[str, Any] = {
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


def with_tape(recipe: TrainingRecipe, say: Callable[[str], None]) -> TrainingRecipe:
    """The recipe with the tape of its model if its architecture has no row; other recipes are returned as they are.

    Args:
        say: callback that receives a short status message.

    Raises:
        UnsupportedError: an option that is not replayed, or a model that cannot be traced.
        LigerprofError: as `simulate_step` does.
    """
    if recipe.spec.no_estimate_reason is None or recipe.spec.tape is not None:
        return recipe
    _require_replayed(recipe)
    longest = at_longest(recipe)
    key = cache_key(_description(longest))
    tape = find_tape(key, longest.rows, longest.row_tokens)
    if tape is None:
        require_packages(recipe, command="estimate", simulated=True)
        say(f"tracing {recipe.spec.name}, which takes some seconds once")
        from ligerprof.runs.tapes.trace import trace_tape

        tape = trace_tape(to_trace(longest))
        keep_tape(key, tape)
    return with_tape_of(recipe, tape)


def with_tape_of(recipe: TrainingRecipe, tape: Tape) -> TrainingRecipe:
    """The recipe with a traced model."""
    parameters = tuple(
        ParameterShape(name=item.name, shape=item.shape, trained=item.trained) for item in tape.parameters
    )
    spec = dataclasses.replace(recipe.spec, parameters=parameters, no_estimate_reason=None, tape=tape)
    return dataclasses.replace(recipe, model=spec)


def to_trace(recipe: TrainingRecipe) -> TrainingRecipe:
    """The part of a recipe that decides the passes of one micro-batch."""
    defaults = {item.name: item.default for item in dataclasses.fields(TrainingRecipe)}
    changed = {name: defaults[name] if value is None else value for name, value in _REPLAYED.items()}
    changed["grad_accum"] = min(recipe.grad_accum, 2)
    if recipe.lora is None:
        # without adapters, the passes are the same where checkpointing keeps its hands off them
        changed["checkpointing"] = False
    return dataclasses.replace(recipe, **changed)


def _description(recipe: TrainingRecipe) -> dict[str, Any]:
    """All that decides a tape besides batch and sequence."""
    traced = to_trace(recipe)
    left_out = {*_REPLAYED, "model", "like", "batch", "seq"}
    options = {name: str(getattr(traced, name)) for name in options_of(TrainingOptions) if name not in left_out}
    return {"config": recipe.spec.config_json, "options": options, "versions": package_versions()}


def _require_replayed(recipe: TrainingRecipe) -> None:
    """Raise for what the replay of a tape does not cover."""
    require_supported(recipe, command="estimate", simulated=True)
    unlike = {
        "--engine fsdp2": recipe.engine is Engine.FSDP2,
        "--engine deepspeed": recipe.engine is Engine.DEEPSPEED,
        "--qlora": recipe.packed_bits is not None,
        "--reentrant": recipe.reentrant,
        "--selective": recipe.selective is not None,
        "--activation-offload": recipe.activation_offload,
        "--packing": recipe.packing,
        "--eval-batch": recipe.eval_batch is not None,
    }
    for option, given in unlike.items():
        if given:
            raise UnsupportedError(
                f"estimate: {option} is not replayed yet for model_type {recipe.spec.model_type!r}, which has no row"
                " in docs/models.md. Use `ligerprof step --device simulated`."
            )
