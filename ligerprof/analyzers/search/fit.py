"""Find the largest batch and sequence that fit a limit, and settings that make the wanted pair fit."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from ligerprof.analyzers.estimate import MainMemory
from ligerprof.analyzers.search.budget import Judge, Method, Verdict, verdict_notes
from ligerprof.analyzers.search.changes import NEAREST, SAME_DATA, Advice, Change, advise
from ligerprof.errors import LigerprofError, UnknownModelError, UnsupportedError
from ligerprof.recipe.categories import Axis
from ligerprof.recipe.flags import recipe_flags
from ligerprof.recipe.lengths import most_rows
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.recipe.usable_memory import Limit
from ligerprof.serialization import JsonKeys, document, select, to_json
from ligerprof.words import Word

# callback that receives a short status message
Progress = Callable[[str], None]
# callback that receives the number of simulations that are probably left
Remaining = Callable[[int], None]

# resolution of the search over sequence lengths, in tokens
SEQ_STEP = 64
# multiples of the recipe's sequence length that the frontier covers
_FRONTIER = (0.25, 0.5, 1, 2, 4, 8, 16)
# an estimate this far above the limit is beyond any error of it that was measured
_CLEARLY_TOO_LARGE = 1.1
# failures through fragmentation after which nothing larger is tried
_FRAGMENTED_TRIES = 3


class Bound(Word):
    """What limits a batch or a sequence: memory, the positions that the model has, or the sequences of the file."""

    MEMORY = "memory"
    POSITIONS = "positions"
    SEQUENCES = "sequences"


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A pair of batch and sequence that fits; the next larger one, along `axis`, exceeds `bounded_by`.

    Attributes:
        fragmented: smaller values along the axis that fail through fragmentation.
    """

    batch: int
    seq: int
    axis: Axis
    verdict: Verdict
    bounded_by: Bound
    fragmented: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens per micro-batch."""
        return self.batch * self.seq

    def to_json(self) -> dict[str, Any]:
        """A point in the JSON."""
        return {**select(self, "batch", "seq", "tokens", "bounded_by", "fragmented"), **self.verdict.to_json()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Nearest:
    """A change with which a recipe fits at the wanted sequence, and its largest batch then."""

    change: Change
    recipe: TrainingRecipe
    point: Point

    def to_json(self) -> dict[str, Any]:
        """An entry of `nearest` in the JSON."""
        return {"change": self.change.name, "flags": list(recipe_flags(self.recipe)), **self.point.to_json()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit(JsonKeys):
    """The result of `ligerprof fit`.

    Attributes:
        recipe: the recipe with the wanted batch and sequence.
        batch: the largest batch at the wanted sequence; None if a batch of 1 does not fit.
        seq: the longest sequence at the wanted batch; None if the shortest does not fit.
        frontier: the largest batch at several sequence lengths, the shortest first.
        settings: if the wanted pair does not fit, the changes that make it fit or come closest.
        settings_gap: why `settings` is None although the pair does not fit, or None.
        nearest: single changes with which a batch fits, the cheapest first, if none does without.
        main_memory: what a process needs in main memory; None where the estimate does not cover the recipe.
    """

    recipe: TrainingRecipe
    limit: Limit
    wanted: Verdict
    batch: Point | None
    seq: Point | None
    frontier: tuple[Point, ...]
    settings: Advice | None
    settings_gap: str | None
    nearest: tuple[Nearest, ...] = ()
    main_memory: MainMemory | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """How the answers were checked, one sentence each."""
        points = (point for point in (self.batch, self.seq, *self.frontier) if point)
        return verdict_notes((self.wanted, *(point.verdict for point in points)))

    def to_json(self) -> dict[str, Any]:
        """The object of `ligerprof fit --json`."""
        return document(
            "fit",
            select(self, "limit_bytes=limit.size_bytes", "limit_source=limit.source"),
            {
                "wanted": {"batch": self.recipe.batch, "seq": self.recipe.seq, **self.wanted.to_json()},
                "batch": self.batch.batch if self.batch else None,
                "seq": self.seq.seq if self.seq else None,
                "seq_step": SEQ_STEP,
                "borders": select(self, "batch", "seq"),
                "frontier": to_json(self.frontier),
                "settings": None if self.settings is None else _settings_json(self.settings),
            },
            select(self, "settings_gap", "nearest", "main_memory", "recipe", "notes"),
        )


def _settings_json(advice: Advice) -> dict[str, Any]:
    changes = [step.change.name for step in advice.applied]
    return {"changes": changes, "flags": list(recipe_flags(advice.plan)), **advice.plan_verdict.to_json()}


# receives each answer when it is known: the wanted verdict, the largest batch, the longest sequence
Answered = Callable[[str, "Verdict | Point | None"], None]


def fit(  # noqa: PLR0913 - callbacks and changes
    recipe: TrainingRecipe,
    judge: Judge,
    progress: Progress,
    remaining: Remaining | None = None,
    *,
    ladder: Sequence[Change] = SAME_DATA,
    nearest: Sequence[Change] = NEAREST,
    answered: Answered | None = None,
) -> Fit:
    """Find the largest batch and sequence that fit the judge's limit.

    Every answer fits while the next larger value does not; one that fails through fragmentation does not end the
    search. If the judge simulates, they were simulated, except values whose estimate is more than a tenth above the
    limit.

    Args:
        ladder: the changes that may make the wanted batch and sequence fit.
        nearest: changes that are tried one by one if no batch fits.
        answered: receives the name (`wanted`, `batch`, `seq`) and the value of each answer when it is known.

    Raises:
        UnsupportedError: neither the analytic estimate nor the simulation covers an option of the recipe.
    """
    answered = answered or (lambda _name, _answer: None)
    search = _Search(recipe, judge, progress, remaining)
    progress(f"{recipe.batch} x {recipe.seq}: does it fit?")
    search.announce()
    wanted = search.verdict(recipe)
    answered("wanted", wanted)
    batch = search.largest_batch(recipe.seq, beyond=True)
    answered("batch", batch)
    # lengths come from the file, and each answer takes a whole run
    seq = search.longest_seq() if recipe.lengths is None else None
    if recipe.lengths is None:
        answered("seq", seq)
    frontier = tuple(_frontier(search)) if recipe.lengths is None else ()
    settings: Advice | None = None
    gap: str | None = None
    if not wanted.fits:
        progress("looking for settings that fit")
        try:
            settings = advise(recipe, judge, ladder=ladder)
        except (UnsupportedError, UnknownModelError) as error:
            gap = str(error)
    return Fit(
        recipe=recipe,
        limit=judge.limit,
        wanted=wanted,
        batch=batch,
        seq=seq,
        frontier=frontier,
        settings=settings,
        settings_gap=gap,
        nearest=tuple(_nearest(recipe, judge, progress, nearest)) if batch is None and recipe.lengths is None else (),
        main_memory=_main_memory(recipe, judge),
    )


def _main_memory(recipe: TrainingRecipe, judge: Judge) -> MainMemory | None:
    with suppress(UnsupportedError, UnknownModelError):
        return judge.estimate(recipe).main_memory
    return None


def _nearest(recipe: TrainingRecipe, judge: Judge, progress: Progress, changes: Sequence[Change]) -> Iterator[Nearest]:
    for change in changes:
        with suppress(LigerprofError):
            outcome = change.outcome(dataclasses.replace(recipe, batch=1))
            if isinstance(outcome, str):
                continue
            progress(f"the largest batch with {change.title}")
            changed = outcome[0]
            if (point := _Search(changed, judge, progress).largest_batch(recipe.seq)) is not None:
                yield Nearest(change=change, recipe=dataclasses.replace(changed, batch=point.batch), point=point)


def _frontier(search: "_Search") -> Iterator[Point]:
    for seq in search.frontier_lengths():
        if (point := search.largest_batch(seq)) is None:
            return
        yield point


class _Axis(NamedTuple):
    """Recipes along one axis: the recipe of a count, the count to start from, and the largest one or None."""

    at: Callable[[int], TrainingRecipe]
    start: int
    most: int | None


class _Search:
    """Searches for the largest values under one judge, starting from the analytic estimate's."""

    def __init__(
        self, recipe: TrainingRecipe, judge: Judge, progress: Progress, remaining: Remaining | None = None
    ) -> None:
        self._recipe, self._judge, self._progress, self._remaining = recipe, judge, progress, remaining
        # recipes that the search will probably judge, by `repr`
        self._ahead: set[str] = set()
        # of the border found last; about as many fit at any other length
        self._tokens = recipe.batch * recipe.seq
        self._batches: dict[int, Point | None] = {}
        # for each simulated step, whether it reserved at least what the estimate says
        self._trusts_estimate: set[bool] = set()

    @property
    def most_positions(self) -> int:
        return max(self._recipe.spec.max_positions, self._recipe.seq)

    def frontier_lengths(self) -> Iterator[int]:
        """The sequence lengths of the frontier, up to the first that is clearly too long."""
        for factor in _FRONTIER:
            seq = int(self._recipe.seq * factor)
            if not SEQ_STEP <= seq <= self.most_positions and seq != self._recipe.seq:
                continue
            if self.is_clearly_too_long(seq):
                return
            yield seq

    def announce(self) -> None:
        """Tell the judge about the recipes on both sides of every border, where the estimate expects it."""
        is_wanted = self._judge.is_told_ahead or (self._remaining is not None and self._judge.simulates)
        if not is_wanted or self._recipe.lengths is not None:
            return
        # estimates take as long as a simulator's start
        self._judge.expect((self._recipe,))
        with suppress(UnsupportedError, UnknownModelError):
            expected = tuple(self._expected())
            self._judge.expect(expected)
            self._ahead = {repr(recipe) for recipe in expected if not self._judge.knows(recipe)}
            self._report()

    def _expected(self) -> Iterator[TrainingRecipe]:
        yield self._recipe
        lengths = (self._recipe.seq, *self.frontier_lengths())
        for place, seq in enumerate(dict.fromkeys(lengths)):
            yield from self._around_border(self._batch_axis(seq))
            if place == 0:
                yield from self._around_border(self._seq_axis())

    def _around_border(self, axis: "_Axis") -> Iterator[TrainingRecipe]:
        guess = self._guess(axis)
        for count in (guess, guess + 1):
            if (axis.most is None or count <= axis.most) and not self._is_clearly_too_large(axis.at(count)):
                yield axis.at(count)

    def largest_batch(self, seq: int, *, beyond: bool = False) -> Point | None:
        """The largest batch at `seq` tokens, or None if a batch of 1 does not fit.

        Args:
            beyond: whether to look beyond failures through fragmentation.
        """
        if seq not in self._batches:
            self._progress(f"the largest batch at {seq} tokens")
            self._batches[seq] = self._largest(self._batch_axis(seq), Axis.BATCH, Bound.SEQUENCES, beyond=beyond)
            point = self._batches[seq]
            self._tokens = (1 if point is None else point.batch) * seq
        return self._batches[seq]

    def is_clearly_too_long(self, seq: int) -> bool:
        """Whether the estimate alone shows that no batch fits."""
        return self._is_clearly_too_large(dataclasses.replace(self._recipe, batch=1, seq=seq))

    def longest_seq(self) -> Point | None:
        """The longest sequence at the recipe's batch, on a grid that contains the recipe's sequence."""
        self._progress(f"the longest sequence at batch {self._recipe.batch}")
        return self._largest(self._seq_axis(), Axis.SEQ, Bound.POSITIONS, beyond=True)

    def _batch_axis(self, seq: int) -> "_Axis":
        base = dataclasses.replace(self._recipe, seq=seq)
        most = None if base.lengths is None else most_rows(base)
        return _Axis(lambda batch: dataclasses.replace(base, batch=batch), self._tokens // seq, most)

    def _seq_axis(self) -> "_Axis":
        wanted = self._recipe.seq
        # count 1 is the shortest sequence of the grid
        offset = wanted - SEQ_STEP * -(-wanted // SEQ_STEP)
        start = (self._tokens // self._recipe.batch - offset) // SEQ_STEP
        most = (self.most_positions - offset) // SEQ_STEP
        return _Axis(lambda count: dataclasses.replace(self._recipe, seq=offset + SEQ_STEP * count), start, most)

    def verdict(self, recipe: TrainingRecipe) -> Verdict:
        """The judge's verdict, which also shows how far the estimate can be trusted."""
        verdict = self._judge.verdict(recipe)
        if (key := repr(recipe)) in self._ahead:
            self._ahead.remove(key)
            self._report()
        if verdict.fits and verdict.checked is Method.SIMULATED:
            with suppress(UnsupportedError, UnknownModelError):
                self._trusts_estimate.add(self._judge.needed_bytes(recipe) <= verdict.held_bytes)
        return verdict

    def _report(self) -> None:
        if self._remaining is not None:
            self._remaining(len(self._ahead))

    def _fits(self, recipe: TrainingRecipe) -> bool:
        """Whether a recipe fits: by the estimate if it is beyond doubt, otherwise by the judge."""
        if self._trusts_estimate == {True} and self._is_clearly_too_large(recipe):
            return False
        return self.verdict(recipe).fits is True

    def _is_clearly_too_large(self, recipe: TrainingRecipe) -> bool:
        if self._recipe.lengths is not None:
            return False
        with suppress(UnsupportedError, UnknownModelError):
            return self._judge.needed_bytes(recipe) > _CLEARLY_TOO_LARGE * self._judge.limit.size_bytes
        return False

    def _guess(self, axis: "_Axis") -> int:
        """The largest count by the estimate; where only the simulation covers the recipe, the count to start from."""
        guess = max(axis.start, 1)
        with suppress(UnsupportedError, UnknownModelError):
            guess = find_border(lambda count: self._is_expected(axis.at(count)), start=guess, most=axis.most)
        return max(guess, 1)

    def _is_expected(self, recipe: TrainingRecipe) -> bool:
        """Whether a recipe completes under the limit by its estimate."""
        estimated, limit_bytes = self._judge.estimate(recipe), self._judge.limit.size_bytes
        # the replay takes longer than the rest
        return estimated.highest_peak_bytes <= limit_bytes and estimated.run.completes_under(limit_bytes)

    def _largest(self, axis: "_Axis", name: Axis, bound: Bound, *, beyond: bool) -> Point | None:
        """The largest count that fits, None for no count: estimated from the start on, then checked by the judge."""
        count = find_border(lambda count: self._fits(axis.at(count)), start=self._guess(axis), most=axis.most)
        failed, fragmented, tried = list[int](), list[int](), count + 1
        while beyond and len(failed) < _FRAGMENTED_TRIES and (axis.most is None or tried <= axis.most):
            if self._fits(axis.at(tried)):
                count, fragmented, failed = tried, [*fragmented, *failed], []
            elif self._fails_through_fragmentation(axis.at(tried)):
                failed.append(tried)
            else:
                break
            tried += 1
        if not count:
            return None
        recipe = axis.at(count)
        return Point(
            batch=recipe.batch,
            seq=recipe.seq,
            axis=name,
            verdict=self._judge.verdict(recipe),
            bounded_by=bound if count == axis.most else Bound.MEMORY,
            fragmented=tuple(getattr(axis.at(each), name) for each in fragmented),
        )

    def _fails_through_fragmentation(self, recipe: TrainingRecipe) -> bool:
        """Whether what a recipe allocates is within the limit, although it does not fit."""
        with suppress(UnsupportedError, UnknownModelError):
            return recipe.lengths is None and self._judge.needed_bytes(recipe) <= self._judge.limit.size_bytes
        return False


def find_border(fits: Callable[[int], bool], *, start: int, most: int | None) -> int:
    """Find the largest count that fits, by steps away from `start` and then bisection.

    The second step is as small as the first, because a good guess is often off by one; the following steps double.

    Args:
        fits: a monotone predicate over counts from 1.
        start: first count to try, at least 1.
        most: largest count to try, or None for no bound.

    Returns:
        0 if 1 does not fit; `most` if all counts fit.
    """
    start = start if most is None else min(start, most)
    if fits(start):
        low, high = _climb(fits, start, most)
    else:
        low, high = _descend(fits, start)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _climb(fits: Callable[[int], bool], start: int, most: int | None) -> tuple[int, int]:
    """A count that fits and a larger one that does not, or one past the bound."""
    low = start
    while low != most:
        high = low + max(low - start, 1)
        high = high if most is None else min(high, most)
        if not fits(high):
            return low, high
        low = high
    return low, low + 1


def _descend(fits: Callable[[int], bool], start: int) -> tuple[int, int]:
    """A count below `start` that fits, or 0, and a larger one that does not."""
    high = start
    while high > 1:
        low = max(high - max(start - high, 1), 1)
        if fits(low):
            return low, high
        high = low
    return 0, 1
