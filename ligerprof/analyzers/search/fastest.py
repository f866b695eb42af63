"""Find the fastest recipes that fit a limit: other micro-batches, checkpointing and kernels for the same training."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

from ligerprof.analyzers.search.budget import Judge, Verdict
from ligerprof.analyzers.search.changes import expandable_segments
from ligerprof.analyzers.step_time.account import predicted_time
from ligerprof.analyzers.step_time.predict import StepTime
from ligerprof.errors import LigerprofError
from ligerprof.kernels.registry import find_kernel_set, require_available
from ligerprof.recipe.flags import recipe_flags
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.recipe.usable_memory import Limit
from ligerprof.serialization import JsonKeys, document, select, to_json

# how many recipes that fit are listed
_LISTED = 5
# ways to checkpoint, from the fastest one on
_CHECKPOINTING: tuple[dict[str, Any], ...] = (
    {"checkpointing": False, "checkpoint_every": 1, "selective": None, "reentrant": False},
    {"checkpointing": True, "checkpoint_every": 4, "selective": None},
    {"checkpointing": True, "checkpoint_every": 3, "selective": None},
    {"checkpointing": True, "checkpoint_every": 2, "selective": None},
    {"checkpointing": True, "checkpoint_every": 1, "selective": "matmuls"},
    {"checkpointing": True, "checkpoint_every": 1, "selective": "attention"},
    {"checkpointing": True, "checkpoint_every": 1, "selective": None},
)
_KERNELS: tuple[dict[str, Any], ...] = (
    {"liger": "all", "provider": "ligerprof"},
    {"liger": "no-flce", "provider": "ligerprof"},
    {"liger": "flce", "provider": "ligerprof"},
    {"liger": "none", "provider": "ligerprof"},
)

Progress = Callable[[str], None]
# receives each recipe that fits and is faster than those before
Better = Callable[["Candidate"], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A recipe with its predicted time, and whether it fits."""

    recipe: TrainingRecipe
    time: StepTime
    verdict: Verdict

    def to_json(self) -> dict[str, Any]:
        """An entry of `recipes` in the JSON."""
        flags = list(recipe_flags(self.recipe))
        return {"flags": flags, **self.time.to_json(), **self.verdict.to_json(), "recipe": self.recipe.to_json()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fastest(JsonKeys):
    """The result of `ligerprof fit --fastest`.

    Attributes:
        given: the recipe as given.
        found: recipes that fit, the fastest first.
        too_large: the recipe that would be the next faster one, and does not fit; None if none is faster.
        tried: how many recipes have a predicted time.
        left_out: what was not tried, and why, one sentence each.
    """

    given: Candidate | None
    recipe: TrainingRecipe
    limit: Limit
    found: tuple[Candidate, ...]
    too_large: Candidate | None
    tried: int
    left_out: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The object of `ligerprof fit --fastest --json`."""
        return document(
            "fastest",
            select(self, "limit_bytes=limit.size_bytes", "limit_source=limit.source", "tried"),
            {
                "given": None if self.given is None else self.given.to_json(),
                "recipes": [candidate.to_json() for candidate in self.found],
                "too_large": None if self.too_large is None else self.too_large.to_json(),
            },
            {"left_out": list(self.left_out), "recipe": to_json(self.recipe)},
        )


def fastest(
    recipe: TrainingRecipe, judge: Judge, progress: Progress, better: Better, *, listed: int = _LISTED
) -> Fastest:
    """Search the recipes that train the same: as many sequences per step, in the same precision.

    Args:
        judge: decides what fits the limit.
        better: receives each recipe that fits and is faster than those before.
        listed: how many recipes that fit to look for.

    Raises:
        UnsupportedError: the time of the recipe's steps is not known.
    """
    predicted_time(recipe)
    progress("the recipe as it is")
    given = _judged(recipe, judge)
    if given is not None and given.verdict.fits:
        better(given)
    reasons: dict[str, None] = {}
    timed = _timed(recipe, reasons, progress)
    if judge.is_told_ahead:
        possible = (each for _, each in timed if judge.by_estimate(each).fits is not False)
        judge.expect(list(islice(possible, listed)))
    found: list[Candidate] = []
    too_large: Candidate | None = None
    for time, each in timed:
        if len(found) == listed:
            break
        progress(f"does {each.batch} x {each.seq}, {each.summary.split(', ', 3)[-1]} fit?")
        candidate = _judged(each, judge, time)
        if candidate is None:
            continue
        if candidate.verdict.fits:
            if not found and (given is None or not given.verdict.fits or time.seconds < given.time.seconds):
                better(candidate)
            found.append(candidate)
        elif not found:
            too_large = candidate
    return Fastest(
        given=given,
        recipe=recipe,
        limit=judge.limit,
        found=tuple(found),
        too_large=too_large if found else None,
        tried=len(timed),
        left_out=(*reasons, "offload, several GPUs, quantized weights and other optimizers: their times are not known"),
    )


def _timed(
    recipe: TrainingRecipe, reasons: dict[str, None], progress: Progress
) -> list[tuple[StepTime, TrainingRecipe]]:
    """The alternatives with their times, the fastest first; `reasons` receives why some are left out."""
    timed: list[tuple[StepTime, TrainingRecipe]] = []
    candidates = list(alternatives(recipe, reasons))
    for number, each in enumerate(candidates, start=1):
        progress(f"times, {number} of {len(candidates)}")
        try:
            timed.append((predicted_time(each), each))
        except LigerprofError as error:
            reasons.setdefault(str(error))
    return sorted(timed, key=lambda item: (item[0].seconds, item[0].gpu_seconds))


def alternatives(recipe: TrainingRecipe, reasons: dict[str, None]) -> Iterator[TrainingRecipe]:
    """The recipe and its alternatives; `reasons` receives why some are not possible."""
    sequences = recipe.batch * recipe.grad_accum
    sizes = [size for size in range(sequences, 0, -1) if sequences % size == 0]
    own = {name: getattr(recipe, name) for name in ("liger", "provider")}
    kernels = [own, *(each for each in _KERNELS if each != own)]
    seen: set[str] = set()
    for size, how, kernel in product(sizes, ({}, *_CHECKPOINTING), kernels):
        changed: dict[str, Any] = {"batch": size, "grad_accum": sequences // size, **how, **kernel}
        try:
            each = dataclasses.replace(recipe, **changed)
            for spec in find_kernel_set(each.providers, each.spec).values():
                require_available(spec, "simulated")
        except LigerprofError as error:
            reasons.setdefault(str(error))
            continue
        if repr(each) not in seen:
            seen.add(repr(each))
            yield each


def _judged(recipe: TrainingRecipe, judge: Judge, time: StepTime | None = None) -> Candidate | None:
    """The recipe with its verdict; with expandable segments if it fits with them alone; None if it has no verdict."""
    try:
        found = time or predicted_time(recipe)
        verdict = judge.by_estimate(recipe)
        if verdict.fits is not False:
            verdict = judge.verdict(recipe)
        if not verdict.fits and not judge.allocates_too_much(recipe):
            outcome: Sequence[TrainingRecipe] | str = expandable_segments.outcome(recipe)
            if not isinstance(outcome, str) and (expanded := judge.verdict(outcome[0])).fits:
                return Candidate(recipe=outcome[0], time=found, verdict=expanded)
        return Candidate(recipe=recipe, time=found, verdict=verdict)
    except LigerprofError:
        return None
