"""Find the fastest recipe that fits a limit: over batches, checkpointing and kernels, or a plan of each layer."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, combinations_with_replacement, groupby, islice, pairwise, product
from math import comb
from typing import Any

from ligerprof.analyzers.estimate.hooks import Hooks
from ligerprof.analyzers.estimate.meter import Meter
from ligerprof.analyzers.estimate.micro_batch import MicroBatch
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.static import make_weights
from ligerprof.analyzers.search.budget import Judge, Verdict
from ligerprof.analyzers.search.changes import expandable_segments
from ligerprof.analyzers.step_time.account import predicted_time, time_or_reason
from ligerprof.analyzers.step_time.rates import Part, StepTime, elapsed
from ligerprof.errors import DoesNotFitError, LigerprofError
from ligerprof.kernels.registry import find_kernel_set, require_available
from ligerprof.recipe.flags import recipe_flags
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.recipe.usable_memory import Limit
from ligerprof.serialization import JsonKeys, document, select
from ligerprof.torch_memory.allocator.settings import SizeRules
from ligerprof.torch_memory.saved_tensors import (
    EVERYTHING,
    FUSED_ATTENTION,
    MATMULS,
    MM,
    NOTHING,
    FactorShape,
    layer_runs,
    shapes_text,
)
from ligerprof.units import format_bytes

# callback that receives a short status message
Progress = Callable[[str], None]
# how many recipes that fit are listed
_LISTED = 5
# all layers checkpointed, which plans divide
_PLAIN: dict[str, Any] = {
    "checkpointing": True,
    "checkpoint_every": 1,
    "selective": None,
    "reentrant": False,
    "activation_offload": False,
}
# ways to checkpoint, from the fastest one on
_CHECKPOINTING: tuple[dict[str, Any], ...] = (
    {**_PLAIN, "checkpointing": False},
    {"checkpointing": True, "checkpoint_every": 4, "selective": None},
    {"checkpointing": True, "checkpoint_every": 3, "selective": None},
    {"checkpointing": True, "checkpoint_every": 2, "selective": None},
    {"checkpointing": True, "checkpoint_every": 1, "selective": "matmuls"},
    {"checkpointing": True, "checkpoint_every": 1, "selective": "attention"},
    {"checkpointing": True, "checkpoint_every": 1, "selective": None},
    {**_PLAIN, "activation_offload": True},
)
_KERNELS: tuple[dict[str, Any], ...] = (
    {"liger": "all", "provider": "ligerprof"},
    {"liger": "no-flce", "provider": "ligerprof"},
    {"liger": "flce", "provider": "ligerprof"},
    {"liger": "none", "provider": "ligerprof"},
)

# pairs of micro-batch and kernels that plans are searched for
_MOST_PAIRS = 6

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
            select(self, "given", "recipes=found", "too_large", "left_out", "recipe"),
        )


def fastest(
    recipe: TrainingRecipe, judge: Judge, progress: Progress, better: Better, *, listed: int = _LISTED
) -> Fastest:
    """Search the recipes that train the same: as many sequences per step, in the same precision.

    Ways to checkpoint that have a name come first, then plans of layers where these can be faster than what was found.

    Args:
        better: receives each recipe that fits and is faster than those before; what fits by the estimate first, and if
            the simulation refuses it, the next one.
        listed: how many recipes that fit to look for.

    Raises:
        UnsupportedError: the time of the recipe's steps is not known.
    """
    predicted_time(recipe)
    rule = _Rule(judge, keeps_cache=True)
    news = _News(rule, better)
    progress("the recipe as it is")
    news.expect(recipe)
    reasons: dict[str, None] = {}
    candidates = list(alternatives(recipe, reasons))
    # an answer where few others fit, and those that are often the fastest
    news.expect(min(candidates, key=_leanness))
    for each in candidates:
        if each.liger == "all" and not each.checkpointing:
            news.expect(each)
    timed = _timed(candidates, reasons, progress)
    for _, each in timed:
        if news.expect(each) is not False:
            break
    given = _judged(recipe, judge)
    news.tell(given)
    if judge.is_told_ahead:
        possible = (each for _, each in timed if judge.by_estimate(each).fits is not False)
        judge.expect(list(islice(possible, listed)))
    found, too_large, spare = _named_ways(timed, rule, progress, news, listed)
    plans = list(_fastest_plans(timed, rule, min(found, key=_seconds, default=None), progress))
    for each_plan in plans:
        news.tell(each_plan)
    found = sorted((*found, *plans), key=_seconds)[:listed] or spare[:listed]
    if spare and found != spare[:listed]:
        reasons.setdefault("what fits and gives cached memory back in each step, whose time is not known")
    if too_large is not None and found and _seconds(too_large) > _seconds(found[0]):
        too_large = None
    return Fastest(
        given=given,
        recipe=recipe,
        limit=judge.limit,
        found=tuple(found),
        too_large=too_large if found else None,
        tried=len(timed),
        left_out=(
            *reasons,
            "offload of the optimizer, several GPUs, quantized weights and other optimizers: their times are not known",
        ),
    )


def _named_ways(
    timed: Iterable[tuple[StepTime, TrainingRecipe]], rule: "_Rule", progress: Progress, news: "_News", listed: int
) -> tuple[list[Candidate], Candidate | None, list[Candidate]]:
    """The fastest recipes that fit, the next faster one, which does not, and what fits but does not keep the cache."""
    found: list[Candidate] = []
    spare: list[Candidate] = []
    too_large: Candidate | None = None
    for time, each in timed:
        if len(found) == listed:
            break
        progress(f"does {each.batch} x {each.seq}, {each.summary.split(', ', 3)[-1]} fit?")
        candidate = _judged(each, rule.judge, time)
        if candidate is None:
            continue
        if not candidate.verdict.fits:
            news.tell(candidate)
            too_large = too_large if found else candidate
        elif rule.passes(candidate.recipe):
            news.tell(candidate)
            found.append(candidate)
        else:
            spare.append(candidate)
    return found, too_large, spare


class _News:
    """Tells each recipe that fits and is faster than those told before, unless these were refused meanwhile."""

    def __init__(self, rule: "_Rule", better: Better) -> None:
        self._rule, self._better = rule, better
        self._told: Candidate | None = None

    def expect(self, recipe: TrainingRecipe) -> bool | None:
        """Tell a recipe that surely fits by the estimate; returns whether it does, or None where that is not known."""
        try:
            time, verdict = predicted_time(recipe), self._rule.judge.by_estimate(recipe)
        except LigerprofError:
            return False
        candidate = Candidate(recipe=recipe, time=time, verdict=verdict)
        if candidate.verdict.fits:
            self.tell(candidate)
        return candidate.verdict.fits

    def tell(self, candidate: Candidate | None) -> None:
        """Tell a recipe if it fits; None: it has no verdict."""
        told = self._told
        if candidate is None:
            return
        if not candidate.verdict.fits:
            self._told = None if told is not None and told.recipe == candidate.recipe else told
        elif (told is None or candidate.time.seconds < told.time.seconds) and self._rule.passes(candidate.recipe):
            self._told = candidate
            self._better(candidate)


def _seconds(candidate: Candidate) -> float:
    return candidate.time.seconds


def _fastest_plans(
    timed: Iterable[tuple[StepTime, TrainingRecipe]], rule: "_Rule", best: Candidate | None, progress: Progress
) -> Iterator[Candidate]:
    """Plans of layers that are faster than the best recipe, and than one another.

    A plan is at most as fast as its micro-batch and kernels are without checkpointing.
    """
    judge, searched = rule.judge, 0
    for time, whole in timed:
        if (best is not None and time.seconds >= best.time.seconds) or searched == _MOST_PAIRS:
            return
        base = dataclasses.replace(whole, **_PLAIN)
        if whole.checkpointing or judge.by_estimate(base).fits is False:
            continue
        searched += 1
        progress(f"plans for {base.batch} x {base.seq}")
        search = _PlanSearch(base, rule, _kinds(base, judge, {}), None if best is None else best.time.seconds)
        if (found := search.settled(progress)) is not None:
            best = found
            yield found


def _leanness(recipe: TrainingRecipe) -> tuple[int, int, int]:
    checkpointed = sum(map(recipe.checkpoints_layer, range(recipe.spec.layers)))
    return recipe.batch, -checkpointed, -len(recipe.kernels)


def _timed(
    candidates: Sequence[TrainingRecipe], reasons: dict[str, None], progress: Progress
) -> list[tuple[StepTime, TrainingRecipe]]:
    """The recipes with their times, the fastest first; `reasons` receives why some are left out."""
    timed: list[tuple[StepTime, TrainingRecipe]] = []
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
    slots = dataclasses.replace(recipe, selective=None, liger="all").kernels
    if "rope" in slots:
        # it does not go with kept products
        kernels.append({"liger": ",".join(slot for slot in slots if slot != "rope"), "provider": "ligerprof"})
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


# an operator whose outputs a layer may keep; of products, with the shape of the second factor
_Output = tuple[str, FactorShape | None]
# how many layers of each kind
_Mix = tuple[int, ...]
# about the most plans of a search, which decides how many kinds one plan can have; with one limit two kinds are enough
# but for whole layers, which a third makes up for
_MOST_PLANS = 25_000
# plans that are estimated before the search ends
_MOST_TRIED = 40
# of the limit, left free where the allocator is to keep its cache: of twelve measured plans that left less, three gave
# cached memory back in each step (benchmarks/results/plans-h200.jsonl)
CACHE_SHARE = 0.015
# by how much less a plan must hold than one that the simulation refused, as a share; doubled with each
_STEP_SHARE = 0.0015


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan(JsonKeys):
    """The result of `ligerprof fit --plan`: what each decoder layer recomputes, keeps or moves to main memory.

    Attributes:
        given: the recipe as it was given.
        chosen: the plan as a recipe.
        by_keys: the fastest way to checkpoint, or not to, that fits and that frameworks have keys for; None if none.
        keeps_cache: whether later steps keep what the allocator has cached. If not, giving it back and asking for it
            again takes time that is not predicted.
        host_bytes: main memory that offloaded activations take, rounded as torch rounds page-locked blocks.
        tried: how many plans were estimated, of how many `possible` ones.
    """

    given: TrainingRecipe
    limit: Limit
    chosen: Candidate
    by_keys: Candidate | None
    keeps_cache: bool
    host_bytes: int
    tried: int
    possible: int
    left_out: tuple[str, ...]

    @property
    def recipe(self) -> TrainingRecipe:
        """The planned recipe."""
        return self.chosen.recipe

    @property
    def layers(self) -> tuple[tuple[int, str], ...]:
        """Runs of successive layers, each with what they keep."""
        recipe = self.recipe
        if not recipe.checkpointing:
            return ((recipe.spec.layers, EVERYTHING),)
        if recipe.checkpoint_every > 1:
            every = (EVERYTHING if index % recipe.checkpoint_every else NOTHING for index in range(recipe.spec.layers))
            return tuple((len(list(run)), name) for name, run in groupby(every))
        runs = layer_runs(recipe.selective or NOTHING)
        return tuple((run.layers or recipe.spec.layers, run.name) for run in runs)

    @property
    def selection(self) -> str:
        """The same as `--selective` and `ligerprof.checkpoint` take it."""
        return ",".join(f"{count}*{name}" for count, name in self.layers)

    def to_json(self) -> dict[str, Any]:
        """The object of `ligerprof fit --plan --json`."""
        return document(
            "plan",
            select(self, "limit_bytes=limit.size_bytes", "limit_source=limit.source"),
            {"layers": [{"layers": count, "keep": name} for count, name in self.layers]},
            {"selection": self.selection, "offload": self.recipe.activation_offload},
            select(
                self,
                "plan=chosen",
                "by_keys",
                "keeps_cache",
                "host_bytes",
                "tried",
                "possible",
                "left_out",
                "recipe=given",
            ),
        )


def plan(recipe: TrainingRecipe, judge: Judge, progress: Progress) -> Plan:
    """Plan what each layer recomputes and keeps, so that the step is fastest within the limit.

    Each kind of layer keeps the outputs of some operators, from none to all. The search goes over the plans that
    `_mixes` makes, the fastest first, and halves the range of held bytes between those that fit and those that do not.
    A plan that keeps more than one that allocates too much is not tried. The answer is the fastest one that fits if
    `_MOST_TRIED` estimates suffice; fragmentation differs from plan to plan, so that a faster one may be left.

    Raises:
        UnsupportedError: the time of the recipe's steps is not known.
        DoesNotFitError: no plan fits.
    """
    base = dataclasses.replace(recipe, **_PLAIN)
    predicted_time(base)
    reasons: dict[str, None] = {}
    progress("what layers can keep")
    kinds = _kinds(base, judge, reasons)
    for rule in (_Rule(judge, keeps_cache=True), _Rule(judge, keeps_cache=False)):
        search = _PlanSearch(base, rule, kinds)
        chosen = search.settled(progress)
        progress("checkpointing that frameworks have keys for")
        by_keys = next(filter(None, map(rule.candidate, _with_keys(base))), None)
        progress("plans that move activations to main memory")
        moved = _moved(base, rule, progress, chosen)
        found = sorted(filter(None, (chosen, by_keys, moved)), key=lambda candidate: candidate.time.seconds)
        if found:
            return Plan(
                given=recipe,
                limit=judge.limit,
                chosen=found[0],
                by_keys=by_keys,
                keeps_cache=rule.keeps_cache,
                host_bytes=judge.estimate(found[0].recipe).host_bytes,
                tried=len(search.known),
                possible=len(search.times),
                left_out=tuple(reasons),
            )
    raise DoesNotFitError(
        f"no plan of this recipe fits {format_bytes(judge.limit.size_bytes)}, not even with each layer recomputed."
        " Run `ligerprof advise` for other changes."
    )


@dataclass(frozen=True, slots=True)
class _Rule:
    """Which recipes fit.

    Attributes:
        keeps_cache: whether later steps may never give cached memory back to make room, which takes time in each.
    """

    judge: Judge
    keeps_cache: bool

    def passes(self, recipe: TrainingRecipe) -> bool:
        """Whether a recipe fits by the estimate, or may fit where a simulation decides."""
        limit_bytes, estimated = self.judge.limit.size_bytes, self.judge.estimate(recipe)
        if not self.keeps_cache:
            fits = self.judge.by_estimate(recipe).fits
            return fits is True or (fits is None and self.judge.simulates)
        in_host = estimated.host is None or estimated.host.fits
        share = max(estimated.run.uncertain_share, CACHE_SHARE)
        return in_host and estimated.run.keeps_cache_under(int(limit_bytes * (1 - share)))

    def candidate(self, recipe: TrainingRecipe) -> Candidate | None:
        """The recipe if it fits, simulated where that is possible; with expandable segments if it fits with those."""
        for each in _variants(recipe):
            if self.passes(each) and (verdict := self.judge.verdict(each)).fits:
                return Candidate(recipe=each, time=predicted_time(each), verdict=verdict)
        return None


def _with_keys(base: TrainingRecipe) -> Iterator[TrainingRecipe]:
    """Ways to checkpoint that frameworks have keys for, the fastest first."""
    yield dataclasses.replace(base, checkpointing=False)
    # one number for each count of checkpointed layers
    numbers = {-(-base.spec.layers // number): number for number in range(1, base.spec.layers + 1)}
    for count in sorted(numbers):
        yield dataclasses.replace(base, checkpoint_every=numbers[count])


def _moved(base: TrainingRecipe, rule: _Rule, progress: Progress, chosen: Candidate | None) -> Candidate | None:
    """The fastest plan whose layers are all checkpointed, with their inputs in main memory; None if none is faster."""
    moving = dataclasses.replace(base, activation_offload=True)
    if isinstance(time_or_reason(moving), str):
        return None
    kinds = _kinds(moving, rule.judge, {})
    if chosen is not None and min(kind.time.seconds for kind in kinds) >= chosen.time.seconds:
        return None
    return _PlanSearch(moving, rule, kinds).settled(progress)


def _variants(recipe: TrainingRecipe) -> Sequence[TrainingRecipe]:
    """The recipe, and with expandable segments if it can have them."""
    outcome: Sequence[TrainingRecipe] | str = expandable_segments.outcome(recipe)
    return (recipe,) if isinstance(outcome, str) else (recipe, *outcome)


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a layer may keep.

    Attributes:
        held_bytes: what the step holds if all layers are of this kind.
        time: of that step.
    """

    name: str
    held_bytes: int
    time: StepTime


def _kinds(base: TrainingRecipe, judge: Judge, reasons: dict[str, None]) -> list[_Kind]:
    """What a layer may keep, from nothing to everything, each kind what the one before keeps and more.

    The outputs join in the order of seconds saved per byte, so that no other choice of outputs saves more with the
    bytes of a mix of two of these kinds.
    """

    def kind(name: str) -> _Kind | None:
        try:
            recipe = planned(base, [(base.spec.layers, name)])
            return _Kind(name, judge.needed_bytes(recipe), predicted_time(recipe))
        except LigerprofError as error:
            reasons.setdefault(str(error))
            return None

    nothing = kind(NOTHING)
    assert nothing is not None
    outputs = _outputs_of_layers(base)
    saved: dict[_Output, float] = {}
    for output, size_bytes in outputs.items():
        alone = kind(_policy_name([output], outputs))
        if alone is not None and alone.time.gpu_seconds < nothing.time.gpu_seconds:
            saved[output] = (nothing.time.gpu_seconds - alone.time.gpu_seconds) / size_bytes
    ordered = sorted(saved, key=lambda output: -saved[output])
    joined = [kind(_policy_name(list(some), outputs)) for some in accumulate([[output] for output in ordered])]
    return [nothing, *filter(None, joined), *filter(None, [kind(EVERYTHING)])]


def planned(base: TrainingRecipe, runs: Sequence[tuple[int, str]]) -> TrainingRecipe:
    """A checkpointed recipe with runs of layers, each with what they keep."""
    runs = [(count, name) for count, name in runs if count]
    if [name for _, name in runs] == [EVERYTHING]:
        return dataclasses.replace(base, checkpointing=False)
    is_plain = [name for _, name in runs] == [NOTHING]
    listed = ",".join(f"{count}*{name}" for count, name in runs)
    return dataclasses.replace(base, selective=None if is_plain else listed)


def _policy_name(kept: Sequence[_Output], outputs: Collection[_Output]) -> str:
    """The policy that keeps these outputs of layers and no others."""
    operators = sorted({operator for operator, _ in kept} - set(FUSED_ATTENTION))
    left = frozenset(shape for operator, shape in outputs if shape is not None and (operator, shape) not in kept)
    words = [operator + (shapes_text(left) if operator == MM else "") for operator in operators]
    return "+".join([*words, *(["attention"] if any(operator in FUSED_ATTENTION for operator, _ in kept) else [])])


def _outputs_of_layers(recipe: TrainingRecipe) -> dict[_Output, int]:
    """The outputs of products and attention in decoder layers, and the bytes of those that the estimate runs."""
    meter = _OutputMeter(SizeRules())
    MicroBatch(recipe, make_weights(recipe), find_kernel_set(recipe.providers, recipe.spec), meter, Hooks()).forward()
    return meter.outputs


class _OutputMeter(Meter):
    """A meter that notes what layers compute and selective checkpointing can keep."""

    def __init__(self, rules: SizeRules) -> None:
        super().__init__(rules)
        self.outputs: Counter[_Output] = Counter()

    def ran(self, operation: object) -> None:
        assert isinstance(operation, Operation)
        if self.place.startswith("layer") and operation.operator in (*MATMULS, *FUSED_ATTENTION):
            output = operation.operator, operation.factor if operation.operator == MM else None
            self.outputs[output] += operation.elements * operation.width + sum(operation.extra_blocks)


class _PlanSearch:
    """The search over how many layers are of each kind.

    Attributes:
        times: the plans and the seconds of their steps, the fastest first, up to `below_seconds`. Interpolated between
            whole-model kinds, which is exact where all layers do the same work.
        known: which plans fit by the estimate.
    """

    def __init__(
        self, base: TrainingRecipe, rule: _Rule, kinds: Sequence[_Kind], below_seconds: float | None = None
    ) -> None:
        self._base, self._rule, self._kinds = base, rule, kinds
        # the host's and the GPU's seconds, by part and kind
        self._rates = [[_seconds_of(kind.time, part) for kind in kinds] for part in Part]
        times = ((mix, self._seconds(mix)) for mix in _mixes(len(kinds), base.spec.layers))
        kept = [item for item in times if below_seconds is None or item[1] < below_seconds]
        self.times = dict(sorted(kept, key=lambda item: item[1]))
        self._bytes = {mix: self._held_bytes(mix) for mix in self.times}
        self.known: dict[_Mix, bool] = {}

    def settled(self, progress: Progress) -> Candidate | None:
        """The fastest plan that fits, simulated where that is possible."""
        refused: set[_Mix] = set()
        share = _STEP_SHARE
        while (mix := self._fastest(refused, progress)) is not None:
            progress(f"does the fastest of {len(self.times)} plans fit?")
            if (found := self._rule.candidate(self._recipe(mix))) is not None:
                return found
            refused |= {mix, *(other for other, held in self._bytes.items() if held > (1 - share) * self._bytes[mix])}
            share *= 2
        return None

    def _fastest(self, refused: Collection[_Mix], progress: Progress) -> _Mix | None:
        """The fastest plan that fits by the estimate."""
        left, best = [mix for mix in self.times if mix not in refused], None
        # between these bytes, what is held decides little on what fits
        low, high = min(self._bytes.values(), default=0.0), float(self._rule.judge.limit.size_bytes)
        tried, target = 0, high
        while left and tried < _MOST_TRIED:
            progress(f"plans, {len(left)} left")
            mix = next((mix for mix in left if self._bytes[mix] <= target), None)
            mix = mix or min(left, key=lambda mix: self._bytes[mix])
            tried += mix not in self.known
            if self._fits(mix):
                best, left, low = mix, left[: left.index(mix)], max(low, self._bytes[mix])
            else:
                high = min(high, self._bytes[mix])
                too_much = self._rule.judge.allocates_too_much(self._recipe(mix))
                left = [other for other in left if other != mix and not (too_much and _keeps_as_much(other, mix))]
            target = (low + high) / 2
        return best

    def _fits(self, mix: _Mix) -> bool:
        if mix not in self.known:
            self.known[mix] = any(map(self._rule.passes, _variants(self._recipe(mix))))
        return self.known[mix]

    def _recipe(self, mix: _Mix) -> TrainingRecipe:
        """Layers that keep more come last: backward frees them before others are computed again."""
        return planned(self._base, [(count, kind.name) for count, kind in zip(mix, self._kinds, strict=True)])

    def _seconds(self, mix: _Mix) -> float:
        layers = sum(mix)

        def share(rates: Iterable[float]) -> float:
            return sum(count * rate for count, rate in zip(mix, rates, strict=True)) / layers

        return elapsed((share(host), share(gpu)) for host, gpu in (zip(*rates, strict=True) for rates in self._rates))

    def _held_bytes(self, mix: _Mix) -> float:
        return sum(count * kind.held_bytes for count, kind in zip(mix, self._kinds, strict=True)) / sum(mix)


def _seconds_of(time: StepTime, part: Part) -> tuple[float, float]:
    found = next((each for each in time.parts if each.part is part), None)
    return (0.0, 0.0) if found is None else (found.host_seconds, found.running_seconds)


def _mixes(kinds: int, layers: int) -> Iterator[_Mix]:
    """All ways to divide the layers among some of the kinds."""
    sizes = {some: comb(kinds, some) * comb(layers + some - 1, some - 1) for some in range(1, kinds + 1)}
    most = max((some for some, size in sizes.items() if size <= _MOST_PLANS), default=1)
    for chosen in combinations(range(kinds), most):
        for cuts in combinations_with_replacement(range(layers + 1), len(chosen) - 1):
            counts = dict(zip(chosen, (end - start for start, end in pairwise((0, *cuts, layers))), strict=True))
            yield tuple(counts.get(kind, 0) for kind in range(kinds))


def _keeps_as_much(mix: _Mix, other: _Mix) -> bool:
    """Whether, layer by layer, a plan keeps what the other one keeps; kinds come in the order of what they keep."""
    return all(own <= others for own, others in zip(accumulate(mix), accumulate(other), strict=True))
