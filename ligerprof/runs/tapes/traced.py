"""Give a recipe whose architecture has no row the tape of its model: from the user's cache, or traced now."""

from collections.abc import Callable
from typing import Any

from ligerprof.errors import UnsupportedError
from ligerprof.models.tape_cache import cache_key, find_tape, keep_tape
from ligerprof.recipe.categories import Engine
from ligerprof.recipe.conflicts import require_packages, require_supported
from ligerprof.recipe.lengths import at_longest
from ligerprof.recipe.options import options_of
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.recipe.training_options import TrainingOptions
from ligerprof.runs.tapes.recipes import REPLAYED, to_trace, with_tape_of
from ligerprof.runs.versions import package_versions


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


def _description(recipe: TrainingRecipe) -> dict[str, Any]:
    """All that decides a tape besides batch and sequence."""
    traced = to_trace(recipe)
    left_out = {*REPLAYED, "model", "like", "batch", "seq"}
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
