"""The ladder of changes that save memory, cheapest first, and the search for those that make a recipe fit."""

import dataclasses
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from ligerprof.analyzers.estimate import MainMemory
from ligerprof.analyzers.search.budget import Judge, Method, Verdict, verdict_notes
from ligerprof.analyzers.step_time.account import time_or_reason
from ligerprof.analyzers.step_time.rates import StepTime
from ligerprof.errors import LigerprofError, RecipeError, UnsupportedError
from ligerprof.kernels.selection import select_kernels
from ligerprof.recipe.categories import Engine, GradSync, Loss, Offload, Optimizer, Precision, ReduceDtype, Wrap
from ligerprof.recipe.flags import recipe_flags
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.recipe.usable_memory import Limit
from ligerprof.serialization import JsonKeys, document, select, to_json
from ligerprof.units import format_bytes
from ligerprof.words import Word

# the recipes that a change can produce, the smallest change first; or the reason why it does not apply
Outcome = tuple[TrainingRecipe, ...] | str
# what a recipe becomes where it is written, or the reason why it cannot be
Settle = Callable[[TrainingRecipe], TrainingRecipe | str]

_EXPANDABLE = "expandable_segments:True"
# of adapters, peft's examples' choice
_RANK = 16
# tokens of a sequence
_SHORTEST = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One rung.

    Attributes:
        name: name in the JSON.
        title: name in printed tables.
        cost: cost in time or precision, in words.
        free: whether it costs next to nothing, so that a plan keeps it rather than a rung that costs more.
    """

    name: str
    title: str
    cost: str
    outcome: Callable[[TrainingRecipe], Outcome]
    free: bool = False


def _change(
    name: str, title: str, cost: str, *, free: bool = False
) -> Callable[[Callable[[TrainingRecipe], Outcome]], Change]:
    return lambda outcome: Change(name=name, title=title, cost=cost, outcome=outcome, free=free)


@_change("kernels", "fused kernels", "none: the same computation with different rounding", free=True)
def _fused_kernels(recipe: TrainingRecipe) -> Outcome:
    # TRL computes its loss in tiles, and refuses a fused one
    wanted = "no-flce" if recipe.loss is Loss.TRL_TILED else "all"
    if recipe.selective not in (None, "attention"):
        # rope writes over outputs that selective checkpointing keeps
        wanted = "+".join(name for name in select_kernels(wanted, recipe.spec) if name != "rope")
    if set(recipe.kernels) == set(select_kernels(wanted, recipe.spec)):
        return "all applicable kernels are in use"
    if recipe.loss is Loss.TRL_TILED:
        return (dataclasses.replace(recipe, liger=wanted),)
    # the fused loss replaces the loss that `loss` selects
    return (dataclasses.replace(recipe, liger=wanted, loss=Loss.HF),)


@_change("zero-2", "ZeRO-2", "little: the communication volume of data parallelism", free=True)
def _zero_2(recipe: TrainingRecipe) -> Outcome:
    if recipe.gpus == 1:
        return "needs several GPUs"
    if recipe.engine is Engine.FSDP2:
        return "FSDP2 shards gradients and optimizer states"
    if recipe.engine is not Engine.DEEPSPEED:
        return _with_deepspeed(recipe, zero=2)
    if recipe.zero >= 2:
        return f"ZeRO-{recipe.zero} already partitions gradients"
    return (dataclasses.replace(recipe, zero=2),)


@_change("grad-sync", "gradients sharded at once", "time: gradients are reduced in every micro-batch")
def _grad_sync(recipe: TrainingRecipe) -> Outcome:
    if recipe.engine is not Engine.FSDP2:
        return "only FSDP2 keeps gradients whole between micro-batches"
    if recipe.grad_accum == 1 or recipe.grad_sync is GradSync.EVERY:
        return "every micro-batch reduces its gradients already"
    return (dataclasses.replace(recipe, grad_sync=GradSync.EVERY),)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """How a framework shards over several GPUs.

    Attributes:
        engine: what the ladder tries first, DeepSpeed or FSDP2.
        wrap: the groups of FSDP2.
        reduce_dtype: of FSDP2 in mixed precision; None for its default.
    """

    engine: Engine = Engine.DEEPSPEED
    wrap: Wrap = Wrap.LAYERS
    reduce_dtype: ReduceDtype | None = None


def _with_fsdp2(recipe: TrainingRecipe, sharding: Sharding) -> Outcome:
    if recipe.engine is Engine.FSDP2:
        return "already enabled"
    if recipe.engine is Engine.DEEPSPEED:
        return "DeepSpeed partitions the states; --sharding fsdp2 takes FSDP2 in its place"
    if recipe.gpus == 1:
        return "needs several GPUs"
    if not recipe.optimizer.row.on_shards:
        return f"{recipe.optimizer} does not work on FSDP2's shards yet"
    # weights in fp32 are gathered in bf16; autocast would keep a copy of each
    mixes = recipe.weight_dtype == "float32" and recipe.autocast == "bfloat16"
    sharded = dataclasses.replace(
        recipe,
        engine=Engine.FSDP2,
        precision=Precision.MIXED if mixes else recipe.precision,
        wrap=sharding.wrap,
        reduce_dtype=sharding.reduce_dtype if mixes else None,
        bucket_view=False,
    )
    return (sharded,)


def _fsdp2(sharding: Sharding) -> Change:
    return Change(
        name="fsdp2",
        title="FSDP2",
        cost="time: weights are gathered in both passes, 1.5 times the communication",
        outcome=lambda recipe: _with_fsdp2(recipe, sharding),
    )


@_change(
    "lora-dropout", "no dropout in adapters", "training: adapters lose this regularization; peft's default has none"
)
def _no_lora_dropout(recipe: TrainingRecipe) -> Outcome:
    if not recipe.lora_dropout:
        return "no adapter has dropout"
    return (dataclasses.replace(recipe, lora_dropout=0.0),)


@_change("checkpointing", "checkpointing", "time: each layer's forward pass runs twice, up to a third more compute")
def _checkpointing(recipe: TrainingRecipe) -> Outcome:
    if recipe.checkpointing and recipe.checkpoint_every == 1 and recipe.selective is None:
        return "already enabled"
    return (dataclasses.replace(recipe, checkpointing=True, checkpoint_every=1, selective=None),)


@_change(
    "mixed-precision",
    "mixed precision",
    "precision: matrix products in 16 bits; weights and moments stay fp32",
)
def _mixed_precision(recipe: TrainingRecipe) -> Outcome:
    if recipe.engine is Engine.FSDP2 and recipe.autocast == "bfloat16" and recipe.weight_dtype == "float32":
        # autocast would keep a copy of every layer's gathered weights
        return (dataclasses.replace(recipe, precision=Precision.MIXED),)
    if recipe.precision is not Precision.FP32:
        return f"precision {recipe.precision} already computes in 16 bits"
    return (dataclasses.replace(recipe, precision=Precision.AMP if _has_bfloat16(recipe) else Precision.AMP_FP16),)


@_change("bf16-weights", "16-bit frozen weights", "precision: weights that do not train are rounded to 16 bits")
def _narrow_frozen_weights(recipe: TrainingRecipe) -> Outcome:
    if not (recipe.lora or recipe.qlora):
        return "all weights train, and 16 bits would lose their small updates"
    if recipe.weight_dtype != "float32":
        return "the weights are in 16 bits already"
    in_float16 = recipe.precision.uses_float16 or not _has_bfloat16(recipe)
    return _tried(recipe, precision=Precision.FP16_AMP if in_float16 else Precision.BF16_AMP)


@_change("zero-3", "ZeRO-3", "time: weights are gathered in both passes, 1.5 times the communication")
def _zero_3(recipe: TrainingRecipe) -> Outcome:
    if recipe.zero == 3:
        return "already enabled"
    if recipe.engine is Engine.FSDP2:
        return "FSDP2 shards the weights"
    if recipe.gpus == 1:
        return "needs several GPUs; offloading enables ZeRO as well"
    if recipe.engine is not Engine.DEEPSPEED:
        return _with_deepspeed(recipe, zero=3)
    return (dataclasses.replace(recipe, zero=3),)


@_change(
    "offload-optimizer",
    "offload the optimizer",
    "time: Adam runs on the CPU; gradients and weights cross PCIe every step",
)
def _offload_optimizer(recipe: TrainingRecipe) -> Outcome:
    if recipe.offload is not Offload.NONE:
        return "the optimizer is already offloaded"
    if recipe.engine is Engine.FSDP2:
        return "FSDP2 offloads everything or nothing"
    return _offloaded(recipe, Offload.OPTIMIZER, max(recipe.zero, 2))


@_change("offload-all", "offload the weights too", "time: weights also cross PCIe in both passes")
def _offload_all(recipe: TrainingRecipe) -> Outcome:
    if recipe.offload.moves_parameters:
        return "the weights are already offloaded"
    if recipe.engine is Engine.FSDP2:
        return (dataclasses.replace(recipe, offload=Offload.ALL),)
    return _offloaded(recipe, Offload.ALL, 3)


@_change("galore", "GaLore", "precision: moments of projected gradients; time: a periodic decomposition")
def _galore(recipe: TrainingRecipe) -> Outcome:
    return _other_optimizer(recipe, Optimizer.GALORE)


@_change("adamw-8bit", "8-bit Adam", "precision: moments in 8 bits with one scale per block")
def _adamw_8bit(recipe: TrainingRecipe) -> Outcome:
    return _other_optimizer(recipe, Optimizer.ADAMW_8BIT)


@_change("bf16", "bf16 weights", "precision: weights, gradients and moments in 16 bits, which lose small updates")
def _bf16(recipe: TrainingRecipe) -> Outcome:
    if recipe.weight_dtype != "float32":
        return "the weights are in 16 bits already"
    if not _has_bfloat16(recipe):
        return f"{recipe.gpu_spec.title} has no bf16"
    return (dataclasses.replace(recipe, precision=Precision.BF16),)


@_change("accumulation", "gradient accumulation", "time: the same sequences per step in more, smaller micro-batches")
def _accumulation(recipe: TrainingRecipe) -> Outcome:
    if recipe.batch == 1:
        return "the micro-batch is 1"
    sizes = [size for size in range(recipe.batch - 1, 0, -1) if recipe.batch % size == 0]
    return tuple(
        dataclasses.replace(recipe, batch=size, grad_accum=recipe.grad_accum * (recipe.batch // size)) for size in sizes
    )


@_change("lora", "LoRA", f"training: only adapters of rank {_RANK} learn")
def _lora(recipe: TrainingRecipe) -> Outcome:
    if recipe.lora or recipe.qlora:
        return "adapters are trained already"
    return _tried(recipe, lora=_RANK)


@_change("qlora", "QLoRA", "training: only adapters learn, over weights in 4 bits")
def _qlora(recipe: TrainingRecipe) -> Outcome:
    if recipe.qlora:
        return "the weights are in 4 bits already"
    if recipe.gpus > 1 or recipe.engine is not Engine.TORCH:
        return "runs on one GPU without an engine"
    return (dataclasses.replace(recipe, lora=None, quantization=None, qlora=recipe.lora or _RANK),)


@_change("sequence", "shorter sequences", "training: longer documents are cut or split")
def _sequence(recipe: TrainingRecipe) -> Outcome:
    sizes = [recipe.seq >> halvings for halvings in range(1, recipe.seq.bit_length())]
    shorter = tuple(dataclasses.replace(recipe, seq=size) for size in sizes if size >= _SHORTEST)
    return shorter or f"sequences have {recipe.seq} tokens"


@_change(
    "expandable-segments",
    "expandable segments",
    "little time: segments grow by driver calls that map memory",
    free=True,
)
def expandable_segments(recipe: TrainingRecipe) -> Outcome:
    """Less fragmentation; not on the ladder, because allocated bytes stay the same."""
    if recipe.alloc_conf and "expandable_segments" in recipe.alloc_conf:
        return f"--alloc-conf sets it: {recipe.alloc_conf}"
    conf = f"{recipe.alloc_conf},{_EXPANDABLE}" if recipe.alloc_conf else _EXPANDABLE
    return (dataclasses.replace(recipe, alloc_conf=conf),)


_UP_TO_ZERO_3 = (
    _zero_2,
    _grad_sync,
    _no_lora_dropout,
    _checkpointing,
    _mixed_precision,
    _narrow_frozen_weights,
    _zero_3,
)
_REST = (
    _accumulation,
    _offload_optimizer,
    _offload_all,
    _galore,
    _adamw_8bit,
    _lora,
    _qlora,
    _sequence,
)


def make_ladder(sharding: Sharding) -> tuple[Change, ...]:
    """The changes, the cheapest first; FSDP2 comes before or after what DeepSpeed would do."""
    fsdp2 = _fsdp2(sharding)
    if sharding.engine is Engine.FSDP2:
        return (_fused_kernels, fsdp2, *_UP_TO_ZERO_3, *_REST)
    return (_fused_kernels, *_UP_TO_ZERO_3, fsdp2, *_REST)


def settled(ladder: Sequence[Change], settle: Settle) -> tuple[Change, ...]:
    """The same changes, with what becomes of their recipes in the place where they are written."""
    return tuple(map(partial(_settled, settle), ladder))


def _settled(settle: Settle, change: Change) -> Change:
    def outcome(recipe: TrainingRecipe) -> Outcome:
        found = change.outcome(recipe)
        if isinstance(found, str):
            return found
        results = tuple(map(settle, found))
        recipes = tuple(each for each in results if not isinstance(each, str))
        return recipes or next(each for each in results if isinstance(each, str))

    return dataclasses.replace(change, outcome=outcome)


LADDER = make_ladder(Sharding())


def same_data(ladder: Sequence[Change]) -> tuple[Change, ...]:
    """The changes that keep batch and sequence as they are asked for."""
    return tuple(change for change in ladder if change.name != _sequence.name)


SAME_DATA = same_data(LADDER)

# tried one by one where no batch fits
NEAREST = (_bf16, _adamw_8bit, _offload_optimizer)


def _tried(recipe: TrainingRecipe, **changes: Any) -> Outcome:
    """The changed recipe, or the conflict of its options."""
    try:
        return (dataclasses.replace(recipe, **changes),)
    except RecipeError as conflict:
        return str(conflict)


def _offloaded(recipe: TrainingRecipe, offload: Offload, zero: int) -> Outcome:
    if not recipe.optimizer.row.is_adam:
        return f"DeepSpeed offloads Adam, not {recipe.optimizer}"
    return _with_deepspeed(recipe, zero=zero, offload=offload, optimizer=Optimizer.DEFAULT)


def _with_deepspeed(recipe: TrainingRecipe, *, zero: int, **changes: Any) -> tuple[TrainingRecipe]:
    in_float16 = recipe.precision.uses_float16 or (recipe.precision is Precision.FP32 and not _has_bfloat16(recipe))
    changed = dataclasses.replace(
        recipe,
        engine=Engine.DEEPSPEED,
        precision=Precision.MIXED_FP16 if in_float16 else Precision.MIXED,
        zero=zero,
        # DDP's
        bucket_view=False,
        grad_sync=GradSync.LAST,
        **changes,
    )
    return (changed,)


def _other_optimizer(recipe: TrainingRecipe, optimizer: Optimizer) -> Outcome:
    if recipe.offload is not Offload.NONE:
        return "the optimizer is offloaded"
    if not recipe.optimizer.row.is_adam:
        return f"replaces Adam, and the recipe uses {recipe.optimizer}"
    return _tried(recipe, optimizer=optimizer)


def _has_bfloat16(recipe: TrainingRecipe) -> bool:
    return recipe.gpu_spec.compute_capability >= (8, 0)


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
        steps: every rung, in the order tried: the ladder's order, except that a rung which helped
            only on a later attempt follows the rung that made it useful.
        plan: the recipe with the applied rungs.
        plan_needed_bytes: the plan's estimated need; `needed_bytes` less the savings of the applied rungs.
        host_bytes: main memory per GPU that the plan's offload uses, otherwise 0.
        host_limit_bytes: limit on the main memory of all GPUs together; None if it was not judged.
        main_memory: what a process of the plan needs in main memory while it loads, trains and saves.
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
    main_memory: MainMemory | None = None

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
            **select(self, "main_memory"),
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
        main_memory=judge.estimate(climb.plan).main_memory,
    )


class _Rules(NamedTuple):
    """What all climbs of a search have in common."""

    ladder: tuple[Change, ...]
    host_limit_bytes: int | None
    tried: Tried
    times: Times


def _cheapest(climb: "_Climb") -> "_Climb":
    """Leave out the rungs that the plan fits without: what costs time or precision first, the most expensive first."""
    if not climb.verdict.fits:
        return climb
    applied = [step.change for step in reversed(climb.steps) if step.state is State.APPLIED]
    for change in sorted(applied, key=lambda change: change.free):
        fewer = climb.without(change)
        # expandable segments may replace what costs more
        if fewer.verdict.fits and not (change.free and fewer.plan.alloc_conf != climb.plan.alloc_conf):
            climb = fewer
    return climb


class _Climb:
    """One climb using the rungs of the given names: the plan so far, its need, and whether it fits."""

    def __init__(self, recipe: TrainingRecipe, judge: Judge, names: set[str], rules: _Rules) -> None:
        self.recipe, self.judge, self.rules = recipe, judge, rules
        self.needed_bytes = judge.needed_bytes(recipe)
        self.plan, self.verdict = self._settle(recipe)
        self.steps: list[Step] = []
        # of the variants of each rung, the one in the plan
        self._variant: dict[str, int] = {}
        for number, change in enumerate(rules.ladder, start=1):
            if self.verdict.fits or change.name not in names:
                self.steps.append(Step(change=change, state=State.SPARE))
            else:
                rules.tried(number, len(rules.ladder))
                self.steps.append(self._take(change))
            self._retry()
        self._unexpanded_bytes = self.needed_bytes
        self.needed_bytes = judge.needed_bytes(self.plan)

    def without(self, change: Change) -> "_Climb":
        """The same climb without a rung, and with each other rung in the same variant."""
        fewer = copy(self)
        fewer.plan, fewer.needed_bytes = self.recipe, self.judge.needed_bytes(self.recipe)
        fewer.steps = [
            fewer._take(step.change, self._variant[step.change.name])
            if step.state is State.APPLIED and step.change is not change
            else Step(change=step.change, state=State.SPARE)
            for step in self.steps
        ]
        fewer._unexpanded_bytes = fewer.needed_bytes
        fewer.plan, fewer.verdict = self._settle(fewer.plan)
        fewer.needed_bytes = self.judge.needed_bytes(fewer.plan)
        return fewer

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

    def _take(self, change: Change, variant: int | None = None) -> Step:
        """Add a rung to the plan if it saves: this variant, without judging it, or the mildest that fits."""
        outcome = self._variants(change)
        if isinstance(outcome, Step):
            return outcome
        if variant is None:
            number, plan, verdict = self._mildest(outcome)
        else:
            number, verdict = min(variant, len(outcome) - 1), self.verdict
            plan = outcome[number][0]
        needed = outcome[number][1]
        step = self._priced(change, needed, State.APPLIED)
        if step.state is State.APPLIED:
            step = replace(step, time_ratio=self._time_ratio(plan))
            self.plan, self.verdict, self.needed_bytes = plan, verdict, needed
            self._variant[change.name] = number
        return step

    def _mildest(self, outcome: Sequence[tuple[TrainingRecipe, int]]) -> tuple[int, TrainingRecipe, Verdict]:
        """The number of the first variant that fits, else of the last; later variants are not judged."""
        for number in range(len(outcome)):
            plan, verdict = self._settle(outcome[number][0])
            if verdict.fits:
                break
        return number, plan, verdict

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
            reason = error.what if isinstance(error, UnsupportedError) else str(error)
            return Step(change=change, state=State.UNPRICED, reason=reason)


def _host_bytes(judge: Judge, recipe: TrainingRecipe) -> int:
    """Main memory that the offload of all GPUs uses."""
    return judge.estimate(recipe).host_bytes * recipe.gpus
