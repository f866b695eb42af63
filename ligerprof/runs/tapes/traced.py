"""Give a recipe whose architecture has no row the tape of its model: from the user's cache, or traced now."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ligerprof.errors import UnsupportedError
from ligerprof.models.tape import Tape
from ligerprof.recipe.categories import Wrap
from ligerprof.recipe.conflicts import require_packages, require_supported
from ligerprof.recipe.lengths import at_longest
from ligerprof.recipe.options import options_of
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.recipe.training_options import TrainingOptions
from ligerprof.runs.tapes.recipes import REPLAYED, Way, to_trace, with_tape_of

if TYPE_CHECKING:
    from ligerprof.runs.tapes.own import OwnModule


def with_tape(recipe: TrainingRecipe, say: Callable[[str], None], own: "OwnModule | None" = None) -> TrainingRecipe:
    """The recipe with the tape of its model if its architecture has no row; other recipes are returned as they are.

    Args:
        say: callback that receives a short status message.
        own: the model, if it is a user's own module.

    Raises:
        UnsupportedError: an option that is not replayed, or a model that cannot be traced.
        LigerprofError: as `simulate_step` does.
    """
    if recipe.spec.no_estimate_reason is None or recipe.spec.tape is not None:
        return recipe
    _require_replayed(recipe)
    longest = at_longest(recipe)
    tape = _find_or_trace(longest, _ways(recipe), say, own)
    evaluated = None if recipe.eval_batch is None else _find_or_trace(longest, (Way.EVALUATION,), say, own)
    return with_tape_of(recipe, tape, evaluated)


def trace_tape(recipe: TrainingRecipe, way: Way = Way.UNITS, own: "OwnModule | None" = None) -> Tape:
    """Trace the model of a recipe around the recipe's size, over a range as wide as one tape holds for.

    Raises:
        UnsupportedError: the passes do not allocate in one order even at one size.
        LigerprofError: as `simulate_step` does.
    """
    from ligerprof.runs.simulated.worker import worker

    tape: Tape = worker().run("ligerprof.runs.tapes.trace:trace_here", recipe, _silent, way=way, own=own)
    return tape


def _ways(recipe: TrainingRecipe) -> tuple[Way, ...]:
    """How the passes of a recipe can be traced: checkpointing that a replay does not rewrite as it runs."""
    if recipe.reentrant or recipe.selective is not None or recipe.activation_offload:
        return (Way.FLAT,)
    # FSDP2 and ZeRO-3 gather layer by layer
    return (Way.UNITS,) if _gathers(recipe) else (Way.UNITS, Way.FLAT)


def _gathers(recipe: TrainingRecipe) -> bool:
    return recipe.engine.is_fsdp or recipe.zero == 3


def _find_or_trace(
    recipe: TrainingRecipe, ways: Sequence[Way], say: Callable[[str], None], own: "OwnModule | None"
) -> Tape:
    """The cached tape of a recipe, or one traced in the first of these ways whose replay is what the model does."""
    from ligerprof.models.tape_cache import cache_key, find_tape, keep_tape

    keys = {way: cache_key(_description(recipe, way)) for way in ways}
    for way, key in keys.items():
        traced = to_trace(recipe, way)
        if (tape := find_tape(key, traced.rows, traced.row_tokens)) is not None:
            return tape
    require_packages(recipe, command="estimate", simulated=True)
    say(f"tracing {recipe.spec.name}, which takes some seconds once")
    *first, last = ways
    for way in first:
        with suppress(UnsupportedError):
            return keep_tape(keys[way], trace_tape(to_trace(recipe, way), way, own))
    return keep_tape(keys[last], trace_tape(to_trace(recipe, last), last, own))


def _description(recipe: TrainingRecipe, way: Way) -> dict[str, Any]:
    """All that decides a tape besides batch and sequence."""
    from ligerprof.runs.outcome import package_versions

    traced = to_trace(recipe, way)
    left_out = {*REPLAYED, "model", "like", "batch", "seq"} - {"checkpoint_every"}
    options = {name: str(getattr(traced, name)) for name in options_of(TrainingOptions) if name not in left_out}
    return {"config": recipe.spec.config_json, "options": options, "way": way, "versions": package_versions()}


def _require_replayed(recipe: TrainingRecipe) -> None:
    """Raise for what the replay of a tape does not cover."""
    require_supported(recipe, command="estimate", simulated=True)
    gathers, engine = _gathers(recipe), "--zero 3" if recipe.zero == 3 else "--engine fsdp2"
    unlike = {
        "--wrap accelerate": recipe.wrap is Wrap.ACCELERATE,
        f"{engine} with --reentrant": gathers and recipe.reentrant,
        f"{engine} with --selective": gathers and recipe.selective is not None,
        f"{engine} with --activation-offload": gathers and recipe.activation_offload,
        f"{engine} with --eval-batch": gathers and recipe.eval_batch is not None,
    }
    for option, given in unlike.items():
        if given:
            raise UnsupportedError(
                f"estimate: {option} is not replayed yet for model_type {recipe.spec.model_type!r}, which has no row"
                " in docs/models.md. Use `ligerprof step --device simulated`."
            )


def _silent(_text: str) -> None:
    pass
