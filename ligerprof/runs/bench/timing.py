"""Time candidates in turns: order, repetitions, and quantiles."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

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
