"""Time candidates in turns: order, repetitions and quantiles, and comparisons with references by alternating runs.

At its power limit, a GPU lowers its clock according to the work of the last tenths of a second: the same products run
up to a twentieth faster after work that waits for memory. Medians of separate turns compare different clocks. So in
`compare_in_turns` a turn belongs to one candidate. It starts with untimed runs of the references; then references and
candidate alternate without a pause, and each run of the candidate is compared with the mean of the references before
and after it.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

WARM_UP_ROUNDS = 2
# timed runs per turn, after one settling time
RUNS_PER_TURN = 3
# longer work keeps the device busy while the host launches the next
_SHORT_SECONDS = 2e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """Work to time; `prepare` restores its inputs and is not timed."""

    name: str
    prepare: Callable[[], object]
    run: Callable[[], object]


class Clock(Protocol):
    """Times asynchronous work."""

    def time(self, run: Callable[[], object], *, head_start: bool) -> Callable[[], float]:
        """Start `run`, after the host has launched all of it if `head_start`; the result waits and returns seconds."""

    def now(self) -> float:
        """Wall-clock seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Repetitions:
    """How often to time each candidate: `least` times, then until `seconds` or `most` is reached, in whole turns.

    Attributes:
        settle_seconds: time that a candidate runs untimed at the start of its turn.
    """

    least: int = 10
    most: int = 60
    seconds: float = 2.0
    settle_seconds: float = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantiles:
    """Median, 20 % and 80 % quantile of one candidate's seconds."""

    median: float
    low: float
    high: float
    count: int


def summarize(seconds: Sequence[float]) -> Quantiles:
    """Quantiles by linear interpolation."""
    low, median, high = (float(value) for value in np.quantile(np.asarray(seconds), (0.2, 0.5, 0.8)))
    return Quantiles(median=median, low=low, high=high, count=len(seconds))


def time_in_turns(candidates: Sequence[Candidate], clock: Clock, repetitions: Repetitions) -> Mapping[str, Quantiles]:
    """Time candidates in rounds; each candidate has one turn per round.

    At its power limit, a GPU's clock depends on the work of the last tenths of a second: after a memory-bound
    candidate, matrix products run faster than after other products. Each turn therefore starts with untimed runs of
    the candidate. Rounds come in pairs, a random order and its reverse, so that remaining drift affects all alike.
    """
    expected = _warm_up(candidates, clock)
    samples: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    started, number = clock.now(), 0
    while (taken := number * RUNS_PER_TURN) < repetitions.least or (
        taken < repetitions.most and clock.now() - started < repetitions.seconds
    ):
        for index in turn_order(len(candidates), number):
            name = candidates[index].name
            samples[name] += _take_turn(candidates[index], clock, expected[name], repetitions.settle_seconds)
        number += 1
    return {name: summarize(seconds) for name, seconds in samples.items()}


def turn_order(count: int, number: int) -> list[int]:
    """The order of candidates in round `number`."""
    order: list[int] = np.random.default_rng((0, number // 2)).permutation(count).tolist()
    return order[::-1] if number % 2 else order


def _warm_up(candidates: Sequence[Candidate], clock: Clock) -> dict[str, tuple[float, float]]:
    """Seconds of one run of each candidate, and its wall-clock seconds with the preparation."""
    expected = {}
    for _ in range(WARM_UP_ROUNDS):
        for candidate in candidates:
            started = clock.now()
            candidate.prepare()
            seconds = clock.time(candidate.run, head_start=True)()
            expected[candidate.name] = seconds, clock.now() - started
    return expected


def _take_turn(candidate: Candidate, clock: Clock, expected: tuple[float, float], settle_seconds: float) -> list[float]:
    seconds, prepared_seconds = expected
    for _ in range(math.ceil(settle_seconds / prepared_seconds)):
        candidate.prepare()
        candidate.run()
    pending = []
    for _ in range(RUNS_PER_TURN):
        candidate.prepare()
        pending.append(clock.time(candidate.run, head_start=seconds < _SHORT_SECONDS))
    return [read() for read in pending]


Run = Callable[[], object]

_CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Contest:
    """A candidate, and the names of the references that it is compared with."""

    name: str
    run: Run
    references: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    """How often to time each candidate.

    Attributes:
        rounds: turns of each candidate.
        runs: timed runs of the candidate per turn, between one more of each reference.
        slow_runs: the same for a candidate that takes twice the time of its references, or longer.
        settle_seconds: how long the references run untimed at the start of each turn.
    """

    rounds: int = 6
    runs: int = 2
    slow_runs: int = 1
    settle_seconds: float = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The runs of one candidate.

    Attributes:
        seconds: each run of the candidate.
        reference_seconds: the runs of each reference in the candidate's turns.
        shares: for each reference, one median per turn of the reference's seconds over the candidate's.
        conditions: what `observe` returned in each turn, while the device was working.
    """

    seconds: tuple[float, ...]
    reference_seconds: Mapping[str, tuple[float, ...]]
    shares: Mapping[str, tuple[float, ...]]
    conditions: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MedianInterval:
    """A median, and an interval that covers the true one with this confidence, whatever the distribution."""

    median: float
    low: float
    high: float
    confidence: float


def median_interval(values: Sequence[float]) -> MedianInterval:
    """The narrowest symmetric order statistics with 95 % confidence; of fewer than six values, the whole range."""
    ordered, count = sorted(values), len(values)
    # each value is below the true median with a chance of one half
    outside, cut = 2 * 0.5**count, 0
    while (wider := outside + 2 * math.comb(count, cut + 1) * 0.5**count) <= 1 - _CONFIDENCE:
        outside, cut = wider, cut + 1
    return MedianInterval(
        median=statistics.median(ordered),
        low=ordered[cut],
        high=ordered[count - 1 - cut],
        confidence=max(0.0, 1 - outside),
    )


def compare_in_turns(
    contests: Sequence[Contest],
    references: Mapping[str, Run],
    clock: Clock,
    turns: Turns,
    observe: Callable[[], Any] = lambda: None,
) -> dict[str, Comparison]:
    """Time each candidate between runs of its references, in `turns.rounds` rounds.

    Rounds come in pairs: a random order of the candidates and of each one's references, and its reverse.

    Args:
        observe: called once per turn, after all its work is queued; reads the device's clock or power.
    """
    expected = _warm_up_pair(contests, references, clock)
    records: dict[str, list[_Turn]] = {contest.name: [] for contest in contests}
    for number in range(turns.rounds):
        for index in turn_order(len(contests), number):
            contest = contests[index]
            names = contest.references[::-1] if number % 2 else contest.references
            cycle_seconds = sum(expected[name] for name in names)
            slow = expected[contest.name] >= 2 * cycle_seconds
            settling = math.ceil(turns.settle_seconds / cycle_seconds)
            for name in names * settling:
                references[name]()
            timed = [*names, *(contest.name, *names) * (turns.slow_runs if slow else turns.runs)]
            runs = {**references, contest.name: contest.run}
            pending = [(name, clock.time(runs[name], head_start=False)) for name in timed]
            seen = observe()
            records[contest.name].append(_Turn(seen, [(name, read()) for name, read in pending]))
    return {contest.name: _summarized(contest, records[contest.name]) for contest in contests}


@dataclass(frozen=True, slots=True)
class _Turn:
    conditions: Any
    runs: list[tuple[str, float]]

    def seconds(self, name: str) -> list[float]:
        return [seconds for of, seconds in self.runs if of == name]

    def share(self, candidate: str, reference: str) -> float:
        around = self.seconds(reference)
        return statistics.median(
            (before + after) / 2 / own
            for before, own, after in zip(around, self.seconds(candidate), around[1:], strict=False)
        )


def _summarized(contest: Contest, turns: list[_Turn]) -> Comparison:
    def all_of(name: str) -> tuple[float, ...]:
        return tuple(seconds for turn in turns for seconds in turn.seconds(name))

    return Comparison(
        seconds=all_of(contest.name),
        reference_seconds={name: all_of(name) for name in contest.references},
        shares={name: tuple(turn.share(contest.name, name) for turn in turns) for name in contest.references},
        conditions=tuple(turn.conditions for turn in turns),
    )


def _warm_up_pair(contests: Sequence[Contest], references: Mapping[str, Run], clock: Clock) -> dict[str, float]:
    """Seconds of one run of each candidate and reference, after one that does not count."""
    runs = {**references, **{contest.name: contest.run for contest in contests}}
    expected = {}
    for name, run in runs.items():
        run()
        expected[name] = clock.time(run, head_start=False)()
    return expected
