"""Decide in which order candidates are timed, how often, and what of the times is told."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

WARM_UP_ROUNDS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One thing to time.

    Attributes:
        prepare: brings inputs back to what they were; not timed.
        run: what is timed.
    """

    name: str
    prepare: Callable[[], object]
    run: Callable[[], object]


class Clock(Protocol):
    """Times work that may finish later than the call that starts it."""

    def time(self, run: Callable[[], object]) -> Callable[[], float]:
        """Start `run`; what is returned waits for its end and gives its seconds."""
        ...

    def now(self) -> float:
        """Wall-clock seconds."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Repetitions:
    """How often each candidate is timed: `least` times, then more while `seconds` last, up to `most`."""

    least: int = 10
    most: int = 60
    seconds: float = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantiles:
    """Median, 20 % and 80 % quantile of the seconds one candidate took."""

    median: float
    low: float
    high: float
    count: int


def summarize(seconds: Sequence[float]) -> Quantiles:
    """Quantiles by linear interpolation."""
    low, median, high = (float(value) for value in np.quantile(np.asarray(seconds), (0.2, 0.5, 0.8)))
    return Quantiles(median=median, low=low, high=high, count=len(seconds))


def time_in_turns(candidates: Sequence[Candidate], clock: Clock, repetitions: Repetitions) -> Mapping[str, Quantiles]:
    """Time candidates round by round, each once a round.

    A clock that drifts, or a chip that warms up, then slows all of them alike. Every other round runs the other way
    round, and every second one starts with the next candidate, so that none always follows the same neighbour.
    """
    samples: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    for number in range(WARM_UP_ROUNDS):
        _run_round(candidates, clock, number)
    started, number = clock.now(), 0
    while number < repetitions.least or (number < repetitions.most and clock.now() - started < repetitions.seconds):
        for name, seconds in _run_round(candidates, clock, number):
            samples[name].append(seconds)
        number += 1
    return {name: summarize(seconds) for name, seconds in samples.items()}


def turn_order(count: int, number: int) -> list[int]:
    """Whose turn it is in round `number`."""
    order = [(number // 2 + place) % count for place in range(count)]
    return order[::-1] if number % 2 else order


def _run_round(candidates: Sequence[Candidate], clock: Clock, number: int) -> list[tuple[str, float]]:
    pending = []
    for index in turn_order(len(candidates), number):
        candidates[index].prepare()
        pending.append((candidates[index].name, clock.time(candidates[index].run)))
    return [(name, read()) for name, read in pending]
