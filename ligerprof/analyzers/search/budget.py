"""Decide whether a recipe fits a limit on reserved bytes, by a simulated step or by the analytic estimate."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ligerprof.analyzers.estimate import Answer, MemoryEstimate, Moment, estimate, judge
from ligerprof.errors import KernelUnavailableError, MissingDependencyError, UnsupportedError
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.recipe.usable_memory import Limit
from ligerprof.serialization import select
from ligerprof.words import Word


class Method(Word):
    """How a verdict was reached; in JSON, "closed form" is the analytic estimate."""

    SIMULATED = "simulated"
    ESTIMATED = "closed form"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reserved:
    """Reserved bytes of the steps simulated under the recipe's limit.

    Attributes:
        steady_bytes: peak of the steady step, or of a whole run; if `fits` is False, of the part that ran.
        second_bytes: peak of DDP's second step, or 0.
        evaluation_bytes: peak of an evaluation, or 0.
        fits: whether all steps, and an evaluation, completed without running out of memory.
        failed_in: the moment in which memory ran out; None if it did not, or before the first step.
        run_step: of a whole run, the step that first reserved most, or in which memory ran out.
    """

    first_bytes: int
    steady_bytes: int
    second_bytes: int = 0
    evaluation_bytes: int = 0
    fits: bool
    failed_in: str | None = None
    run_step: int | None = None

    @property
    def highest(self) -> tuple[Moment, int]:
        """The moment that reserved most, and its bytes."""
        moments = {
            Moment.STEADY: self.steady_bytes,
            Moment.FIRST: self.first_bytes,
            Moment.SECOND: self.second_bytes,
            Moment.EVALUATION: self.evaluation_bytes,
        }
        moment = max(moments, key=lambda each: moments[each])
        return moment, moments[moment]

    def completes_under(self, limit_bytes: int) -> bool:
        """Whether what was simulated completes, for the limit that it was simulated under."""
        return self.fits and self.highest[1] <= limit_bytes

    @property
    def decided_by(self) -> Moment | None:
        """The moment that decides whether the recipe fits; None if memory ran out before the first step."""
        if self.fits:
            return self.highest[0]
        return None if self.failed_in is None else Moment(self.failed_in)


# simulates a recipe under its memory_limit_bytes; raises one of these errors if it cannot
Check = Callable[[TrainingRecipe], Reserved]
Expect = Callable[[Sequence[TrainingRecipe]], None]
_UNCOVERED = (UnsupportedError, KernelUnavailableError, MissingDependencyError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether a recipe fits, and how this was determined.

    Attributes:
        answer: the judge's; None where it is not known what is trained.
        held_bytes: the highest peak of all steps and an evaluation: reserved bytes if simulated (up to the failure if
            it ran out of memory), allocated bytes if estimated.
        reason: why the requested simulation was not possible, or None.
        decided_by: the moment with the highest peak, or in which memory ran out; None if that was before any step.
        run_step: the number of that step in a simulated run over a file of lengths, else None.
        fits_host: whether what training keeps in main memory fits the limit on that; True without one.
    """

    answer: Answer | None
    held_bytes: int
    checked: Method
    reason: str | None = None
    decided_by: Moment | None = None
    run_step: int | None = None
    fits_host: bool = True

    @property
    def fits(self) -> bool | None:
        """The answer in JSON: None where it may not fit."""
        return None if self.answer is None else self.answer.fits

    @property
    def method(self) -> str:
        """The method in printed text."""
        return "simulated" if self.checked is Method.SIMULATED else "estimated"

    @property
    def held(self) -> str:
        """What `held_bytes` counts."""
        return "reserved" if self.checked is Method.SIMULATED else "allocated"

    def to_json(self) -> dict[str, Any]:
        """A `verdict` object of the JSON of fit and advise."""
        return select(
            self, "fits", "verdict=answer", "held_bytes", "held", "checked", "reason", "decided_by", "run_step"
        )


def verdict_notes(verdicts: Iterable[Verdict]) -> tuple[str, ...]:
    """Why verdicts were not simulated, one sentence each."""
    return tuple(dict.fromkeys(f"not simulated: {verdict.reason}" for verdict in verdicts if verdict.reason))


class Judge:
    """Decides whether recipes fit one limit; caches estimates and verdicts.

    Args:
        limit: on reserved bytes.
        check: simulates a recipe; None judges by the estimate.
        expect: receives the recipes that `check` will probably be asked about, so that it can prepare the answers.
    """

    def __init__(self, limit: Limit, check: Check | None = None, expect: Expect | None = None) -> None:
        self.limit = limit
        self._check = check
        self._expect = expect
        self._known: dict[str, Verdict] = {}
        self._estimates: dict[str, MemoryEstimate] = {}

    def estimate(self, recipe: TrainingRecipe) -> MemoryEstimate:
        """The analytic estimate.

        Raises:
            UnsupportedError: it does not cover an option of the recipe.
            UnknownModelError: it does not cover the model's architecture.
        """
        key = repr(recipe)
        if key not in self._estimates:
            self._estimates[key] = estimate(recipe)
        return self._estimates[key]

    def needed_bytes(self, recipe: TrainingRecipe) -> int:
        """Estimated allocated bytes: the highest peak of the first step, the steady step and an evaluation."""
        return self.estimate(recipe).highest_peak_bytes

    def verdict(self, recipe: TrainingRecipe) -> Verdict:
        """Judge by simulation if requested and possible, otherwise by the analytic estimate."""
        key = repr(recipe)
        if key not in self._known:
            self._known[key] = self._judge(recipe)
        return self._known[key]

    @property
    def is_told_ahead(self) -> bool:
        """Whether `expect` has an effect."""
        return self._expect is not None

    @property
    def simulates(self) -> bool:
        """Whether verdicts are simulated where that is possible."""
        return self._check is not None

    def knows(self, recipe: TrainingRecipe) -> bool:
        """Whether a recipe was judged before."""
        return repr(recipe) in self._known

    def expect(self, recipes: Iterable[TrainingRecipe]) -> None:
        """Announce the recipes that will probably be judged next, instead of those announced before."""
        if self._expect is not None:
            self._expect([self._limited(recipe) for recipe in recipes if not self.knows(recipe)])

    def allocates_too_much(self, recipe: TrainingRecipe) -> bool:
        """Whether a recipe is estimated to allocate more than the limit, so that less fragmentation cannot help."""
        return self.needed_bytes(recipe) > self.limit.size_bytes

    def by_estimate(self, recipe: TrainingRecipe, reason: str | None = None) -> Verdict:
        """Judge by the analytic estimate alone."""
        estimated = self.estimate(recipe)
        moment, allocated_bytes = estimated.highest
        in_host = estimated.host is None or estimated.host.fits
        run = estimated.run
        return Verdict(
            answer=judge(
                self.limit.size_bytes, run.completes_under, uncertain_share=run.uncertain_share, fits_host=in_host
            ),
            held_bytes=allocated_bytes,
            checked=Method.ESTIMATED,
            reason=reason,
            decided_by=moment,
            fits_host=in_host,
        )

    def _judge(self, recipe: TrainingRecipe) -> Verdict:
        if self._check is None:
            return self.by_estimate(recipe)
        try:
            reserved = self._check(self._limited(recipe))
        except _UNCOVERED as error:
            return self.by_estimate(recipe, str(error))
        _, held_bytes = reserved.highest
        host = None if recipe.host_memory_bytes is None else self.estimate(recipe).host
        decided_by, in_host = reserved.decided_by, host is None or host.fits
        return Verdict(
            answer=judge(self.limit.size_bytes, reserved.completes_under, fits_host=in_host),
            held_bytes=held_bytes,
            checked=Method.SIMULATED,
            decided_by=decided_by,
            run_step=reserved.run_step if decided_by is Moment.STEADY else None,
            fits_host=in_host,
        )

    def _limited(self, recipe: TrainingRecipe) -> TrainingRecipe:
        return dataclasses.replace(recipe, memory_limit_bytes=self.limit.size_bytes)
