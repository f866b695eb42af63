"""Time candidates between runs of what they are compared with, and an interval of the median of such shares."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ligerprof.runs.bench.accuracy import Clock, Run, turn_order

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
class TimeComparison:
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
) -> dict[str, TimeComparison]:
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


def _summarized(contest: Contest, turns: list[_Turn]) -> TimeComparison:
    def all_of(name: str) -> tuple[float, ...]:
        return tuple(seconds for turn in turns for seconds in turn.seconds(name))

    return TimeComparison(
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
