"""Find the largest batch and sequence that fit a limit, and settings that make the wanted pair fit."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ligerprof.analyzers.search.advise import Advice, advise
from ligerprof.analyzers.search.budget import (
    ALLOWANCE_BYTES,
    Judge,
    Limit,
    Method,
    Verdict,
    needed_bytes,
    verdict_notes,
)
from ligerprof.errors import UnknownModelError, UnsupportedError
from ligerprof.recipe.categories import Axis
from ligerprof.recipe.flags import recipe_flags
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.serialization import JsonKeys, document, select, to_json
from ligerprof.words import Word

# callback that receives a short status message
Progress = Callable[[str], None]

# resolution of the search over sequence lengths, in tokens
SEQ_STEP = 64
# multiples of the recipe's sequence length that the frontier covers
_FRONTIER = (0.25, 0.5, 1, 2, 4, 8, 16)
# an estimate this far above the limit is beyond any error of it that was measured
_CLEARLY_TOO_LARGE = 1.1


class Bound(Word):
    """What limits a batch or a sequence: memory, or the positions that the model has."""

    MEMORY = "memory"
    POSITIONS = "positions"


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A pair of batch and sequence that fits; the next larger one, along `axis`, exceeds `bounded_by`."""

    batch: int
    seq: int
    axis: Axis
    verdict: Verdict
    bounded_by: Bound

    @property
    def tokens(self) -> int:
        """Tokens per micro-batch."""
        return self.batch * self.seq

    def to_json(self) -> dict[str, Any]:
        """A point in the JSON."""
        return {**select(self, "batch", "seq", "tokens", "bounded_by"), **self.verdict.to_json()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit(JsonKeys):
    """The result of `ligerprof fit`.

    Attributes:
        recipe: the recipe with the wanted batch and sequence.
        wanted: whether the wanted pair fits.
        batch: the largest batch at the wanted sequence; None if a batch of 1 does not fit.
        seq: the longest sequence at the wanted batch; None if the shortest does not fit.
        frontier: the largest batch at several sequence lengths, the shortest first.
        settings: if the wanted pair does not fit, the changes that make it fit or come closest.
        settings_gap: why `settings` is None although the pair does not fit, or None.
    """

    recipe: TrainingRecipe
    limit: Limit
    wanted: Verdict
    batch: Point | None
    seq: Point | None
    frontier: tuple[Point, ...]
    settings: Advice | None
    settings_gap: str | None

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
                "allowance_bytes": ALLOWANCE_BYTES,
                "wanted": {"batch": self.recipe.batch, "seq": self.recipe.seq, **self.wanted.to_json()},
                "batch": self.batch.batch if self.batch else None,
                "seq": self.seq.seq if self.seq else None,
                "seq_step": SEQ_STEP,
                "borders": select(self, "batch", "seq"),
                "frontier": to_json(self.frontier),
                "settings": None if self.settings is None else _settings_json(self.settings),
            },
            select(self, "settings_gap", "recipe", "notes"),
        )


def _settings_json(advice: Advice) -> dict[str, Any]:
    changes = [step.change.name for step in advice.applied]
    return {"changes": changes, "flags": list(recipe_flags(advice.plan)), **advice.plan_verdict.to_json()}


def fit(recipe: TrainingRecipe, judge: Judge, progress: Progress) -> Fit:
    """Find the largest batch and sequence that fit the judge's limit.

    Every answer fits while the next larger value does not. If the judge simulates, both were simulated.

    Raises:
        UnsupportedError: neither the analytic estimate nor the simulation covers an option of the recipe.
    """
    search = _Search(recipe, judge, progress)
    progress(f"{recipe.batch} x {recipe.seq}: does it fit?")
    wanted = judge.verdict(recipe)
    batch = search.largest_batch(recipe.seq)
    # lengths come from the file, and each answer takes a whole run
    seq = search.longest_seq() if recipe.lengths is None else None
    frontier = tuple(_frontier(search, recipe)) if recipe.lengths is None else ()
    settings: Advice | None = None
    gap: str | None = None
    if not wanted.fits:
        progress("looking for settings that fit")
        try:
            settings = advise(recipe, judge)
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
    )


def _frontier(search: "_Search", recipe: TrainingRecipe) -> Iterator[Point]:
    for factor in _FRONTIER:
        seq = int(recipe.seq * factor)
        if not SEQ_STEP <= seq <= search.most_positions and seq != recipe.seq:
            continue
        if search.is_clearly_too_long(seq) or (point := search.largest_batch(seq)) is None:
            return
        yield point


class _Search:
    """Searches for the largest values under one judge, starting from the analytic estimate's."""

    def __init__(self, recipe: TrainingRecipe, judge: Judge, progress: Progress) -> None:
        self._recipe, self._judge, self._progress = recipe, judge, progress
        # estimated bytes at which the search starts: the limit, lowered once a simulated border shows the overhead
        self._aim_bytes = judge.limit.size_bytes
        # of the border found last; about as many fit at any other length
        self._tokens = recipe.batch * recipe.seq
        self._batches: dict[int, Point | None] = {}

    @property
    def most_positions(self) -> int:
        """The longest sequence to consider."""
        return max(self._recipe.spec.max_positions, self._recipe.seq)

    def largest_batch(self, seq: int) -> Point | None:
        """The largest batch at `seq` tokens, or None if a batch of 1 does not fit."""
        if seq not in self._batches:
            self._progress(f"the largest batch at {seq} tokens")
            base = dataclasses.replace(self._recipe, seq=seq)
            size = self._largest(lambda batch: dataclasses.replace(base, batch=batch), self._tokens // seq, None)
            self._batches[seq] = self._point(dataclasses.replace(base, batch=size), Axis.BATCH) if size else None
            self._tokens = max(size, 1) * seq
        return self._batches[seq]

    def is_clearly_too_long(self, seq: int) -> bool:
        """Whether the estimate alone shows that no batch fits."""
        one = dataclasses.replace(self._recipe, batch=1, seq=seq)
        with suppress(UnsupportedError, UnknownModelError):
            return needed_bytes(one) > _CLEARLY_TOO_LARGE * self._judge.limit.size_bytes
        return False

    def longest_seq(self) -> Point | None:
        """The longest sequence at the recipe's batch, on a grid that contains the recipe's sequence."""
        self._progress(f"the longest sequence at batch {self._recipe.batch}")
        wanted = self._recipe.seq
        # count 1 is the shortest sequence of the grid
        offset = wanted - SEQ_STEP * -(-wanted // SEQ_STEP)

        def at(count: int) -> TrainingRecipe:
            return dataclasses.replace(self._recipe, seq=offset + SEQ_STEP * count)

        most = (self.most_positions - offset) // SEQ_STEP
        count = self._largest(at, (self._tokens // self._recipe.batch - offset) // SEQ_STEP, most)
        return self._point(at(count), Axis.SEQ, at_most=count == most) if count else None

    def _point(self, recipe: TrainingRecipe, axis: Axis, *, at_most: bool = False) -> Point:
        return Point(
            batch=recipe.batch,
            seq=recipe.seq,
            axis=axis,
            verdict=self._judge.verdict(recipe),
            bounded_by=Bound.POSITIONS if at_most else Bound.MEMORY,
        )

    def _largest(self, at: Callable[[int], TrainingRecipe], start: int, most: int | None) -> int:
        """The largest count that fits, or 0: estimated from `start` on, then checked by the judge."""
        guess = max(start, 1)
        # where only the simulation covers the recipe, it starts there
        with suppress(UnsupportedError, UnknownModelError):
            guess = find_border(lambda count: needed_bytes(at(count)) <= self._aim_bytes, start=guess, most=most)
        count = find_border(lambda count: self._judge.verdict(at(count)).fits, start=max(guess, 1), most=most)
        if count and self._judge.verdict(at(count)).checked is Method.SIMULATED and count != guess:
            with suppress(UnsupportedError, UnknownModelError):
                self._aim_bytes = min(needed_bytes(at(count)), self._judge.limit.size_bytes)
        return count


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
