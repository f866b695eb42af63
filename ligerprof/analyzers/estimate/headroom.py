"""Decide how much workspace the fused loss may take so that the step's peak, which lies elsewhere, stays what it is."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from ligerprof.analyzers.estimate.step import step_peaks
from ligerprof.errors import UnknownModelError
from ligerprof.kernels.linear_cross_entropy.plan import aligned
from ligerprof.kernels.registry import find_kernel_set
from ligerprof.kernels.spec import KernelSpec
from ligerprof.recipe.categories import FlceBudget
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.torch_memory.dtypes import FP32_BYTES, HALF_BYTES
from ligerprof.units import format_bytes

# workspaces are tried in steps of so many tokens of logits: whole tiles of a product
_TILE_TOKENS = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Headroom:
    """What `--flce-budget auto` comes to, with the estimated peaks that it rests on.

    Attributes:
        budget: bytes of workspace, or `lean` where nothing is to be had for free.
        peak_bytes: the step's peak with that budget, the first step's included.
        lean_peak_bytes: the same with `lean`, which is as low as it gets.
        balanced_peak_bytes: the same with `balanced`.
    """

    budget: FlceBudget | int
    peak_bytes: int
    lean_peak_bytes: int
    balanced_peak_bytes: int


@lru_cache(maxsize=16)
def find_headroom(recipe: TrainingRecipe) -> Headroom:
    """The largest workspace that leaves the estimated peak where the smallest one has it.

    What the loss may take is the peak elsewhere in the step less what is allocated when the loss begins. Both follow
    from the analytic estimate, which gives the peak at one size after another; each halves the range.

    Raises:
        UnknownModelError: an architecture that the estimate does not cover.
        KernelUnavailableError: a kernel that the provider does not have.
    """
    if recipe.spec.no_estimate_reason is not None:
        raise UnknownModelError(
            f"{recipe.spec.name}: {recipe.spec.no_estimate_reason}, on which --flce-budget auto rests. Give bytes."
        )
    kernels = find_kernel_set(recipe.kernels, recipe.provider)
    lean_peak_bytes = _peak_bytes(recipe, kernels, FlceBudget.LEAN)
    fitting: FlceBudget | int = FlceBudget.LEAN
    low, high = 0, -(-recipe.tokens // _TILE_TOKENS)
    while low < high:
        tiles = (low + high + 1) // 2
        budget = _logits_bytes(recipe, min(tiles * _TILE_TOKENS, recipe.tokens))
        if _peak_bytes(recipe, kernels, budget) <= lean_peak_bytes:
            low, fitting = tiles, budget
        else:
            high = tiles - 1
    return Headroom(
        budget=fitting,
        peak_bytes=_peak_bytes(recipe, kernels, fitting),
        lean_peak_bytes=lean_peak_bytes,
        balanced_peak_bytes=_peak_bytes(recipe, kernels, FlceBudget.BALANCED),
    )


def settle_flce_budget(recipe: TrainingRecipe) -> TrainingRecipe:
    """The recipe with `auto` replaced by what it comes to; any other recipe as it is.

    Raises:
        LigerprofError: what `find_headroom` raises.
    """
    if recipe.flce_budget is not FlceBudget.AUTO:
        return recipe
    budget = find_headroom(recipe).budget if "flce" in recipe.kernels else FlceBudget.BALANCED
    return dataclasses.replace(recipe, flce_budget=budget)


def headroom_note(recipe: TrainingRecipe) -> str | None:
    """What `auto` came to and what it costs, in a line; None where it was not asked for."""
    if recipe.flce_budget is not FlceBudget.AUTO or "flce" not in recipe.kernels:
        return None
    found = find_headroom(recipe)
    budget = found.budget if isinstance(found.budget, str) else format_bytes(found.budget)
    return (
        f"flce budget auto: {budget} of workspace; the estimated peak is {format_bytes(found.peak_bytes)} with it,"
        f" {format_bytes(found.lean_peak_bytes)} with lean, {format_bytes(found.balanced_peak_bytes)} with balanced"
    )


def _peak_bytes(recipe: TrainingRecipe, kernels: Mapping[str, KernelSpec], budget: FlceBudget | int) -> int:
    chosen = dataclasses.replace(recipe, flce_budget=budget)
    return max(step_peaks(chosen, kernels, first=first).peak.total_bytes for first in (False, True))


def _logits_bytes(recipe: TrainingRecipe, tokens: int) -> int:
    """Logits of so many tokens, each row padded as the loss pads it."""
    element_bytes = FP32_BYTES if recipe.compute_dtype == "float32" else HALF_BYTES
    return tokens * aligned(recipe.spec.vocab_size) * element_bytes
