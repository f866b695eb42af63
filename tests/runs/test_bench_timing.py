from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ligerprof.runs.bench.timing import (
    WARM_UP_ROUNDS,
    Candidate,
    Repetitions,
    summarize,
    time_in_turns,
    turn_order,
)


class DriftingClock:
    """Every timed run takes `start` seconds at first, and `drift` more each time; what runs is written down."""

    def __init__(self, start: float = 1.0, drift: float = 0.0) -> None:
        self.seconds, self.drift, self.wall = start, drift, 0.0
        self.log: list[str] = []

    def time(self, run: Callable[[], object]) -> Callable[[], float]:
        run()
        taken = self.seconds
        self.seconds += self.drift
        self.wall += taken
        return lambda: taken

    def now(self) -> float:
        return self.wall

    def candidate(self, name: str) -> Candidate:
        return Candidate(
            name=name,
            prepare=lambda: self.log.append(f"prepare {name}"),
            run=lambda: self.log.append(f"run {name}"),
        )


def repeat(count: int) -> Repetitions:
    return Repetitions(least=count, most=count, seconds=0.0)


@given(count=st.integers(1, 9), number=st.integers(0, 40))
def test_everybody_has_one_turn_a_round(count: int, number: int) -> None:
    assert sorted(turn_order(count, number)) == list(range(count))


@given(count=st.integers(2, 9))
def test_nobody_is_always_first_or_always_behind_the_same_neighbour(count: int) -> None:
    orders = [turn_order(count, number) for number in range(2 * count)]
    assert len({order[0] for order in orders}) > 1
    before = {(order[place - 1], order[place]) for order in orders for place in range(1, count)}
    for index in range(count):
        assert len({first for first, second in before if second == index}) >= min(2, count - 1)


def test_inputs_are_prepared_before_every_run() -> None:
    clock = DriftingClock()
    time_in_turns([clock.candidate("a"), clock.candidate("b")], clock, repeat(3))
    assert len(clock.log) == 2 * 2 * (3 + WARM_UP_ROUNDS)
    for prepared, ran in zip(clock.log[::2], clock.log[1::2], strict=True):
        assert (prepared.split()[0], ran.split()[0]) == ("prepare", "run")
        assert prepared.split()[1] == ran.split()[1]


@given(count=st.integers(2, 6), rounds=st.integers(10, 30))
def test_a_drifting_clock_hits_all_alike(count: int, rounds: int) -> None:
    clock = DriftingClock(start=1.0, drift=0.01)
    candidates = [clock.candidate(str(index)) for index in range(count)]
    medians = [times.median for times in time_in_turns(candidates, clock, repeat(rounds)).values()]
    # one after the other, the last would be slower by `rounds` drifts or more for each before it
    one_round = 0.01 * count
    assert max(medians) - min(medians) <= one_round


def test_warm_up_is_not_counted() -> None:
    clock = DriftingClock(start=100.0, drift=-1.0)
    times = time_in_turns([clock.candidate("a")], clock, repeat(5))["a"]
    assert (times.count, times.median) == (5, 100.0 - WARM_UP_ROUNDS - 2)


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0.0, 10), (25.0, 25), (1000.0, 60)], ids=["at least", "time box", "at most"]
)
def test_repetitions_are_boxed_by_time_and_count(seconds: float, expected: int) -> None:
    clock = DriftingClock()
    box = Repetitions(least=10, most=60, seconds=seconds)
    assert time_in_turns([clock.candidate("a")], clock, box)["a"].count == expected


@given(st.lists(st.floats(1e-6, 10), min_size=1, max_size=50))
def test_quantiles_lie_between_their_neighbours_in_order(seconds: list[float]) -> None:
    times, ordered = summarize(seconds), sorted(seconds)
    for share, value in ((0.2, times.low), (0.5, times.median), (0.8, times.high)):
        place = share * (len(ordered) - 1)
        below, above = ordered[int(place)], ordered[min(int(place) + 1, len(ordered) - 1)]
        assert value == pytest.approx(below + (above - below) * (place - int(place)))
    assert times.count == len(seconds)
