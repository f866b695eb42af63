"""Decide how much workspace the fused loss may use without raising the step's peak, which is elsewhere."""

import dataclasses
from dataclasses import dataclass
from functools import lru_cache

from ligerprof.analyzers.estimate.replayed import run_estimate
from ligerprof.errors import UnknownModelError
from ligerprof.kernels.linear_cross_entropy.plan import aligned
from ligerprof.recipe.categories import FlceBudget
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.torch_memory.dtypes import FP32_BYTES, HALF_BYTES
from ligerprof.units import format_bytes

# workspaces are tried in steps of this many tokens of logits: whole tiles of a matrix product
_TILE_TOKENS = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Headroom:
    """The budget that `--flce-budget auto` selects, and the estimated peaks behind the choice.

    Attributes:
        budget: bytes of workspace, or `lean` if no larger one is free.
        peak_bytes: the highest peak of all steps with that budget.
        lean_peak_bytes: the same with `lean`, the lowest.
        balanced_peak_bytes: the same with `balanced`.
    """

    budget: FlceBudget | int
    peak_bytes: int
    lean_peak_bytes: int
    balanced_peak_bytes: int


@lru_cache(maxsize=16)
def find_headroom(recipe: TrainingRecipe) -> Headroom:
    """The largest workspace whose estimated peak is not above that of the smallest one, found by bisection.

    Raises:
        UnknownModelError: an architecture that the estimate does not cover.
        KernelUnavailableError: a kernel that the provider does not have.
    """
    if recipe.spec.no_estimate_reason is not None:
        raise UnknownModelError(
            f"{recipe.spec.name}: {recipe.spec.no_estimate_reason}, which --flce-budget auto needs. Give bytes."
        )
    lean_peak_bytes = _peak_bytes(recipe, FlceBudget.LEAN)
    fitting: FlceBudget | int = FlceBudget.LEAN
    low, high = 0, -(-recipe.tokens // _TILE_TOKENS)
    while low < high:
        tiles = (low + high + 1) // 2
        budget = _logits_bytes(recipe, min(tiles * _TILE_TOKENS, recipe.tokens))
        if _peak_bytes(recipe, budget) <= lean_peak_bytes:
            low, fitting = tiles, budget
        else:
            high = tiles - 1
    return Headroom(
        budget=fitting,
        peak_bytes=_peak_bytes(recipe, fitting),
        lean_peak_bytes=lean_peak_bytes,
        balanced_peak_bytes=_peak_bytes(recipe, FlceBudget.BALANCED),
    )


def settle_flce_budget(recipe: TrainingRecipe) -> TrainingRecipe:
    """The recipe with the budget `auto` replaced by the selected one; other recipes unchanged.

    Raises:
        LigerprofError: what `find_headroom` raises.
    """
    if recipe.flce_budget is not FlceBudget.AUTO:
        return recipe
    budget = find_headroom(recipe).budget if "flce" in recipe.kernels else FlceBudget.BALANCED
    return dataclasses.replace(recipe, flce_budget=budget)


def headroom_note(recipe: TrainingRecipe) -> str | None:
    """The budget that `auto` selected and its peaks, in a line; None for other budgets."""
    if recipe.flce_budget is not FlceBudget.AUTO or "flce" not in recipe.kernels:
        return None
    found = find_headroom(recipe)
    budget = found.budget if isinstance(found.budget, str) else format_bytes(found.budget)
    return (
        f"flce budget auto: {budget} of workspace; the estimated peak is {format_bytes(found.peak_bytes)} with it,"
        f" {format_bytes(found.lean_peak_bytes)} with lean, {format_bytes(found.balanced_peak_bytes)} with balanced"
    )


def _peak_bytes(recipe: TrainingRecipe, budget: FlceBudget | int) -> int:
    run, _ = run_estimate(dataclasses.replace(recipe, flce_budget=budget))
    return max(run.peak_bytes(number) for number in range(1, run.steady + 1))


def _logits_bytes(recipe: TrainingRecipe, tokens: int) -> int:
    """Bytes of the logits of `tokens`, with the loss's padding of rows."""
    element_bytes = FP32_BYTES if recipe.compute_dtype == "float32" else HALF_BYTES
    return tokens * aligned(recipe.spec.vocab_size) * element_bytes
