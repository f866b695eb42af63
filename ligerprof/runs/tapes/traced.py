"""Give a recipe whose architecture has no row the tape of its model: from the user's cache, or traced now."""

from collections.abc import Callable, Sequence
from typing import Any

from ligerprof.errors import UnsupportedError
from ligerprof.models.tape import Tape
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
    # checkpointing that a replay does not rewrite is traced as it is
    of_units = not (recipe.reentrant or recipe.selective is not None or recipe.activation_offload)
    ways = (False, True) if of_units else (True,)
    for flat in ways:
        tape = find_tape(cache_key(_description(longest, flat=flat)), longest.rows, longest.row_tokens)
        if tape is not None:
            return with_tape_of(recipe, tape)
    require_packages(recipe, command="estimate", simulated=True)
    say(f"tracing {recipe.spec.name}, which takes some seconds once")
    return with_tape_of(recipe, _trace(longest, ways))


def _trace(recipe: TrainingRecipe, ways: Sequence[bool]) -> Tape:
    """Trace the model in units or, if the replay of their checkpointing is not that of the model, flat."""
    from ligerprof.runs.tapes.trace import trace_tape

    flat, *others = ways
    try:
        tape = trace_tape(to_trace(recipe, flat=flat), flat=flat)
    except UnsupportedError:
        if not others:
            raise
        return _trace(recipe, others)
    keep_tape(cache_key(_description(recipe, flat=flat)), tape)
    return tape


def _description(recipe: TrainingRecipe, *, flat: bool) -> dict[str, Any]:
    """All that decides a tape besides batch and sequence."""
    traced = to_trace(recipe, flat=flat)
    left_out = {*REPLAYED, "model", "like", "batch", "seq"} - ({"checkpoint_every"} if flat else set())
    options = {name: str(getattr(traced, name)) for name in options_of(TrainingOptions) if name not in left_out}
    return {"config": recipe.spec.config_json, "options": options, "flat": flat, "versions": package_versions()}


def _require_replayed(recipe: TrainingRecipe) -> None:
    """Raise for what the replay of a tape does not cover."""
    require_supported(recipe, command="estimate", simulated=True)
    unlike = {
        "--engine fsdp2": recipe.engine is Engine.FSDP2,
        "--engine deepspeed": recipe.engine is Engine.DEEPSPEED,
        "--eval-batch": recipe.eval_batch is not None,
    }
    for option, given in unlike.items():
        if given:
            raise UnsupportedError(
                f"estimate: {option} is not replayed yet for model_type {recipe.spec.model_type!r}, which has no row"
                " in docs/models.md. Use `ligerprof step --device simulated`."
            )
