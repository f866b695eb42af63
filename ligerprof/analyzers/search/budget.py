"""Whether a recipe keeps to a limit of reserved bytes, and by which judge: the simulated step, else the closed form."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ligerprof.analyzers.estimate import estimate
from ligerprof.errors import KernelUnavailableError, MissingDependencyError, NotBuiltError, RecipeError
from ligerprof.recipe.training import TrainingRecipe

Way = Literal["simulated", "closed form"]

# no figure of the closed form is fitted, so nothing is added for what only an allocator knows
ALLOWANCE_BYTES = 0
ALLOWANCE = (
    "the closed form counts allocated bytes and allows 0 bytes for what the allocator reserves beyond them:"
    " stay some percent below an answer that was not simulated"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reserved:
    """What a simulated allocator reserved under the recipe's limit.

    Attributes:
        first_bytes: the highest of the first step.
        steady_bytes: the highest of the steady step; of whatever ran where `fits` is False.
        fits: whether both steps ended without running out of memory.
    """

    first_bytes: int
    steady_bytes: int
    fits: bool


# simulates a recipe under its memory_limit_bytes; raises NotBuiltError and the like where it cannot
Check = Callable[[TrainingRecipe], Reserved]
_UNCOVERED = (NotBuiltError, KernelUnavailableError, MissingDependencyError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """What a recipe must keep to.

    Attributes:
        size_bytes: most bytes that torch's allocator may reserve.
        source: what set it, such as `--memory-limit`.
    """

    size_bytes: int
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether a recipe fits, and how that was found out.

    Attributes:
        held_bytes: the higher of both steps: reserved bytes where simulated (when it ran out: those
            reserved so far), allocated bytes in closed form.
        checked: the judge.
        reason: why the step was not simulated although that was wanted, or None.
    """

    fits: bool
    held_bytes: int
    checked: Way
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        """A `verdict` object of the JSON of fit and advise."""
        return {
            "fits": self.fits,
            "held_bytes": self.held_bytes,
            "held": "reserved" if self.checked == "simulated" else "allocated",
            "checked": self.checked,
            "reason": self.reason,
        }


def find_limit(recipe: TrainingRecipe) -> Limit:
    """The recipe's memory limit, or what its GPU leaves to torch beside the CUDA context.

    Raises:
        RecipeError: the limit is above the GPU's memory.
    """
    gpu, given_bytes = recipe.gpu_spec, recipe.memory_limit_bytes
    if given_bytes is not None and given_bytes > gpu.memory_bytes:
        raise RecipeError(
            f"--memory-limit {given_bytes} bytes is more than {gpu.title} has. Lower it, or choose --gpu."
        )
    if given_bytes is not None and given_bytes <= gpu.usable_bytes:
        return Limit(size_bytes=given_bytes, source="--memory-limit")
    return Limit(size_bytes=gpu.usable_bytes, source=f"{gpu.title} less the CUDA context")


def needed_bytes(recipe: TrainingRecipe) -> int:
    """Allocated bytes of the higher of the first and the steady step, in closed form.

    Raises:
        NotBuiltError: an option that has no closed form.
        UnknownModelError: an architecture that has none.
    """
    estimated = estimate(recipe)
    return max(estimated.peak_bytes, estimated.first_step_peak_bytes) + ALLOWANCE_BYTES


class Judge:
    """Says of recipes whether they keep to one limit; what was simulated once is not simulated again."""

    def __init__(self, limit: Limit, check: Check | None) -> None:
        self.limit = limit
        self._check = check
        self._known: dict[str, Verdict] = {}

    def verdict(self, recipe: TrainingRecipe) -> Verdict:
        """Judge by simulation where it is wanted and covers the recipe, else by the closed form."""
        key = repr(recipe)
        if key not in self._known:
            self._known[key] = self._judge(recipe)
        return self._known[key]

    def by_closed_form(self, recipe: TrainingRecipe, reason: str | None = None) -> Verdict:
        """Judge by the closed form alone."""
        held_bytes = needed_bytes(recipe)
        return Verdict(
            fits=held_bytes <= self.limit.size_bytes, held_bytes=held_bytes, checked="closed form", reason=reason
        )

    def _judge(self, recipe: TrainingRecipe) -> Verdict:
        if self._check is None:
            return self.by_closed_form(recipe)
        try:
            reserved = self._check(dataclasses.replace(recipe, memory_limit_bytes=self.limit.size_bytes))
        except _UNCOVERED as error:
            return self.by_closed_form(recipe, str(error))
        held_bytes = max(reserved.first_bytes, reserved.steady_bytes)
        return Verdict(
            fits=reserved.fits and held_bytes <= self.limit.size_bytes, held_bytes=held_bytes, checked="simulated"
        )
