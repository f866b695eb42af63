"""Find the changes that bring a recipe below a limit: try the ladder rung by rung until the recipe fits."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ligerprof.analyzers.search.budget import Judge, Method, Verdict, verdict_notes
from ligerprof.analyzers.search.changes import LADDER, Change, expandable_segments
from ligerprof.analyzers.step_time.account import time_or_reason
from ligerprof.analyzers.step_time.predict import StepTime
from ligerprof.errors import LigerprofError
from ligerprof.recipe.flags import recipe_flags
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.recipe.usable_memory import Limit
from ligerprof.serialization import JsonKeys, document, select, to_json
from ligerprof.units import format_bytes
from ligerprof.words import Word

# receives the number of the change that is tried next, and the most that will be tried
Tried = Callable[[int, int], None]
# the predicted time of a recipe, or why it is not known
Times = Callable[[TrainingRecipe], StepTime | str]


class State(Word):
    """Outcome of a change; spare: saves memory that is not needed; unpriced: not covered by the estimate."""

    APPLIED = "applied"
    SPARE = "spare"
    USELESS = "useless"
    INAPPLICABLE = "inapplicable"
    UNPRICED = "unpriced"


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One rung of the ladder, tried on the recipe that the applied rungs before it produced.

    Attributes:
        saved_bytes: the estimated saving; for a spare rung, its saving on top of the plan; None if
            it is inapplicable or unpriced.
        needed_bytes: the estimated need with this rung; None as above.
        reason: why the rung is useless, inapplicable or unpriced; otherwise None.
        time_ratio: the predicted time per token with this rung over that without it; None if it is not known.
    """

    change: Change
    state: State
    saved_bytes: int | None = None
    needed_bytes: int | None = None
    reason: str | None = None
    time_ratio: float | None = None

    def to_json(self) -> dict[str, Any]:
        """An entry of `steps` in the JSON."""
        return {
            **select(self, "change.name", "state", "saved_bytes", "needed_bytes", "change.cost", "reason"),
            "time_percent": None if self.time_ratio is None else round(100 * (self.time_ratio - 1), 1),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice(JsonKeys):
    """A plan that brings a recipe below a limit, or the closest that the ladder gets.

    Attributes:
        recipe: the recipe as given.
        needed_bytes: its estimated need: the higher peak of the first and the steady step.
        verdict: whether the recipe fits unchanged.
        steps: every rung, in the order tried: the ladder's order, except that a rung which helped
            only on a later attempt follows the rung that made it useful.
        plan: the recipe with the applied rungs.
        plan_needed_bytes: the plan's estimated need; `needed_bytes` less the savings of the applied rungs.
        plan_verdict: whether the plan fits.
        host_bytes: main memory per GPU that the plan's offload uses, otherwise 0.
        host_limit_bytes: limit on the main memory of all GPUs together; None if it was not judged.
    """

    recipe: TrainingRecipe
    limit: Limit
    needed_bytes: int
    verdict: Verdict
    steps: tuple[Step, ...]
    plan: TrainingRecipe
    plan_needed_bytes: int
    plan_verdict: Verdict
    host_bytes: int
    host_limit_bytes: int | None = None

    @property
    def margin_bytes(self) -> int:
        """What the plan leaves of the limit; negative if it does not fit."""
        return self.limit.size_bytes - self.plan_verdict.held_bytes

    @property
    def fits_host(self) -> bool:
        """Whether the plan's offload fits the limit on main memory."""
        return self.host_limit_bytes is None or self.host_bytes * self.plan.gpus <= self.host_limit_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the plan fits the GPU, and main memory if that has a limit; None where it may not fit."""
        return self.plan_verdict.fits if self.fits_host else False

    @property
    def applied(self) -> tuple[Step, ...]:
        """The rungs that are part of the plan."""
        return tuple(step for step in self.steps if step.state is State.APPLIED)

    @property
    def notes(self) -> tuple[str, ...]:
        """How the verdicts were reached, one sentence each."""
        return verdict_notes((self.verdict, self.plan_verdict))

    def to_json(self) -> dict[str, Any]:
        """The object of `ligerprof advise --json`, without the command to run next."""
        plan = {
            **select(self, "needed_bytes=plan_needed_bytes", "verdict=plan_verdict", "host_bytes", "margin_bytes"),
            "flags": recipe_flags(self.plan),
            "recipe": self.plan,
        }
        return document(
            "advise",
            select(self, "limit_bytes=limit.size_bytes", "limit_source=limit.source", "host_limit_bytes"),
            select(self, "needed_bytes", "verdict", "steps", "fits"),
            {"plan": to_json(plan)},
        )


def advise(
    recipe: TrainingRecipe,
    judge: Judge,
    tried: Tried | None = None,
    *,
    host_limit_bytes: int | None = None,
    ladder: Sequence[Change] = LADDER,
) -> Advice:
    """Climb the ladder until the recipe fits the judge's limit.

    Args:
        recipe: what to train, how, and on which GPU.
        judge: decides whether a recipe fits.
        tried: receives the number of each change before it is tried, and the number of changes; each climb starts anew.
        host_limit_bytes: limit on the main memory that the offload of all GPUs uses; None: no limit.
        ladder: the changes, the cheapest first.

    Raises:
        UnsupportedError: the analytic estimate does not cover an option of the recipe.
        UnknownModelError: it does not cover the model's architecture.
    """
    known: dict[str, StepTime | str] = {}

    def times(each: TrainingRecipe) -> StepTime | str:
        if (key := repr(each)) not in known:
            known[key] = time_or_reason(each)
        return known[key]

    rules = _Rules(tuple(ladder), host_limit_bytes, tried or (lambda _number, _most: None), times)
    names = {change.name for change in rules.ladder}
    # steps on the way may keep more in main memory than the plan
    climb = _cheapest(_Climb(recipe, judge, names, rules._replace(host_limit_bytes=None)))
    climb.rules = rules
    if host_limit_bytes is not None and _host_bytes(judge, climb.plan) > host_limit_bytes:
        climb = _cheapest(_Climb(recipe, judge, names, rules))
    return Advice(
        recipe=recipe,
        limit=judge.limit,
        needed_bytes=judge.needed_bytes(recipe),
        verdict=judge.verdict(recipe),
        steps=(*map(climb.final, climb.steps), climb.expansion()),
        plan=climb.plan,
        plan_needed_bytes=climb.needed_bytes,
        plan_verdict=judge.verdict(climb.plan),
        host_bytes=judge.estimate(climb.plan).host_bytes,
        host_limit_bytes=host_limit_bytes,
    )


class _Rules(NamedTuple):
    """What all climbs of a search have in common."""

    ladder: tuple[Change, ...]
    host_limit_bytes: int | None
    tried: Tried
    times: Times


def _cheapest(climb: "_Climb") -> "_Climb":
    """Climb again without the rungs that a later one made unnecessary, the most expensive first."""
    applied = [step.change for step in climb.steps if step.state is State.APPLIED]
    for change in reversed([change for change in applied[:-1] if not change.free]):
        if not climb.verdict.fits:
            break
        names = {step.change.name for step in climb.steps if step.state is State.APPLIED}
        fewer = _Climb(climb.recipe, climb.judge, names - {change.name}, climb.rules)
        climb = fewer if fewer.verdict.fits else climb
    return climb


class _Climb:
    """One climb using the rungs of the given names: the plan so far, its need, and whether it fits."""

    def __init__(self, recipe: TrainingRecipe, judge: Judge, names: set[str], rules: _Rules) -> None:
        self.recipe, self.judge, self.rules = recipe, judge, rules
        self.needed_bytes = judge.needed_bytes(recipe)
        self.plan, self.verdict = self._settle(recipe)
        self.steps: list[Step] = []
        for number, change in enumerate(rules.ladder, start=1):
            if self.verdict.fits or change.name not in names:
                self.steps.append(Step(change=change, state=State.SPARE))
            else:
                rules.tried(number, len(rules.ladder))
                self.steps.append(self._take(change))
            self._retry()
        self._unexpanded_bytes = self.needed_bytes
        self.needed_bytes = judge.needed_bytes(self.plan)

    def final(self, step: Step) -> Step:
        """Recompute the saving of an unused rung on top of the plan."""
        if step.state not in (State.SPARE, State.USELESS):
            return step
        outcome = self._variants(step.change)
        if isinstance(outcome, Step):
            return outcome
        priced = self._priced(step.change, outcome[0][1], State.SPARE)
        return replace(priced, time_ratio=self._time_ratio(outcome[0][0]))

    def expansion(self) -> Step:
        """The expandable-segments rung: it reduces fragmentation, not allocated bytes."""
        if self.plan.alloc_conf != self.recipe.alloc_conf:
            return Step(
                change=expandable_segments,
                state=State.APPLIED,
                saved_bytes=self._unexpanded_bytes - self.needed_bytes,
                needed_bytes=self.needed_bytes,
            )
        if self.verdict.checked is Method.ESTIMATED:
            reason = "fragmentation shows only in simulated steps"
            return Step(change=expandable_segments, state=State.UNPRICED, reason=reason)
        reason = "fragmentation is not the problem" if self.verdict.fits else "they do not make it fit"
        return Step(change=expandable_segments, state=State.USELESS, reason=reason)

    def _retry(self) -> None:
        """Retry rungs that did not help before: they may help now, and they cost less than the remaining rungs."""
        last = self.steps[-1]
        while last.state is State.APPLIED and not self.verdict.fits:
            for unused in [step for step in self.steps if step.state in (State.USELESS, State.INAPPLICABLE)]:
                if self.verdict.fits:
                    return
                again = self._take(unused.change)
                if again.state is State.APPLIED:
                    self.steps.remove(unused)
                    self.steps.append(again)
            if self.steps[-1] is last:
                return
            last = self.steps[-1]

    def _take(self, change: Change) -> Step:
        outcome = self._variants(change)
        if isinstance(outcome, Step):
            return outcome
        plan, verdict, needed = _mildest((*self._settle(variant), needed) for variant, needed in outcome)
        step = self._priced(change, needed, State.APPLIED)
        if step.state is State.APPLIED:
            step = replace(step, time_ratio=self._time_ratio(plan))
            self.plan, self.verdict, self.needed_bytes = plan, verdict, needed
        return step

    def _priced(self, change: Change, needed: int, state: State) -> Step:
        saved_bytes = self.needed_bytes - needed
        if saved_bytes > 0:
            return Step(change=change, state=state, saved_bytes=saved_bytes, needed_bytes=needed)
        reason = "saves nothing here" if saved_bytes == 0 else "uses more than it saves here"
        return Step(change=change, state=State.USELESS, saved_bytes=saved_bytes, needed_bytes=needed, reason=reason)

    def _time_ratio(self, changed: TrainingRecipe) -> float | None:
        """The predicted time per token after a change of the plan over that before; None where one is not known."""
        times = [self.rules.times(recipe) for recipe in (self.plan, changed)]
        rates = [time.tokens_per_second for time in times if not isinstance(time, str)]
        return rates[0] / rates[1] if len(rates) == len(times) else None

    def _settle(self, recipe: TrainingRecipe) -> tuple[TrainingRecipe, Verdict]:
        """Judge a recipe; if only fragmentation keeps it from fitting, add expandable segments."""
        verdict = self.judge.verdict(recipe)
        outcome = expandable_segments.outcome(recipe)
        if verdict.fits or isinstance(outcome, str) or self.judge.allocates_too_much(recipe):
            return recipe, verdict
        expanded = self.judge.verdict(outcome[0])
        return (outcome[0], expanded) if expanded.fits else (recipe, verdict)

    def _variants(self, change: Change) -> tuple[tuple[TrainingRecipe, int], ...] | Step:
        """The recipes that a change of the plan can produce, each with its estimated need, or why there is none."""
        most = self.rules.host_limit_bytes
        try:
            outcome = change.outcome(self.plan)
            if isinstance(outcome, str):
                return Step(change=change, state=State.INAPPLICABLE, reason=outcome)
            if most is not None:
                sizes = [_host_bytes(self.judge, variant) for variant in outcome]
                # a plan over the limit may come closer to it
                allowed = max(most, _host_bytes(self.judge, self.plan) - 1)
                outcome = tuple(each for each, size_bytes in zip(outcome, sizes, strict=True) if size_bytes <= allowed)
                if not outcome:
                    needed = format_bytes(min(sizes))
                    reason = f"needs {needed} of main memory; the limit is {format_bytes(most)}"
                    return Step(change=change, state=State.INAPPLICABLE, reason=reason)
            return tuple((variant, self.judge.needed_bytes(variant)) for variant in outcome)
        except LigerprofError as error:
            return Step(change=change, state=State.UNPRICED, reason=str(error))


def _mildest(settled: Iterable[tuple[TrainingRecipe, Verdict, int]]) -> tuple[TrainingRecipe, Verdict, int]:
    """The first variant that fits, else the last; later variants are not judged."""
    for item in settled:
        if item[1].fits:
            break
    return item


def _host_bytes(judge: Judge, recipe: TrainingRecipe) -> int:
    """Main memory that the offload of all GPUs uses."""
    return judge.estimate(recipe).host_bytes * recipe.gpus
