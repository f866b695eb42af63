from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ligerprof.runs.bench.accuracy import (
    RUNS_PER_TURN,
    WARM_UP_ROUNDS,
    Repetitions,
    TimedCall,
    summarize,
    time_in_turns,
    turn_order,
)


class DriftingClock:
    """Every timed run takes `start` seconds at first, and `drift` more each time; what runs is written down."""

    def __init__(self, start: float = 1.0, drift: float = 0.0) -> None:
        self.seconds, self.drift, self.wall = start, drift, 0.0
        self.log: list[str] = []
        self.head_starts: list[bool] = []

    def time(self, run: Callable[[], object], *, head_start: bool) -> Callable[[], float]:
        run()
        self.head_starts.append(head_start)
        taken = self.seconds
        self.seconds += self.drift
        self.wall += taken
        return lambda: taken

    def now(self) -> float:
        return self.wall

    def candidate(self, name: str) -> TimedCall:
        return TimedCall(
            name=name,
            prepare=lambda: self.log.append(f"prepare {name}"),
            run=lambda: self.log.append(f"run {name}"),
        )


def repeat(turns: int, settle_seconds: float = 0.0) -> Repetitions:
    return Repetitions(
        least=turns * RUNS_PER_TURN, most=turns * RUNS_PER_TURN, seconds=0.0, settle_seconds=settle_seconds
    )


@given(count=st.integers(1, 9), number=st.integers(0, 40))
def test_everybody_has_one_turn_a_round(count: int, number: int) -> None:
    assert sorted(turn_order(count, number)) == list(range(count))


@given(count=st.integers(2, 9))
def test_nobody_is_always_first_or_always_behind_the_same_neighbour(count: int) -> None:
    orders = [turn_order(count, number) for number in range(8 * count)]
    assert len({order[0] for order in orders}) > 1
    before = {(order[place - 1], order[place]) for order in orders for place in range(1, count)}
    for index in range(count):
        assert len({first for first, second in before if second == index}) == count - 1


@given(count=st.integers(1, 9), number=st.integers(0, 20))
def test_every_order_is_run_backwards_too(count: int, number: int) -> None:
    assert turn_order(count, 2 * number + 1) == turn_order(count, 2 * number)[::-1]


def test_inputs_are_prepared_before_every_run() -> None:
    clock = DriftingClock()
    time_in_turns([clock.candidate("a"), clock.candidate("b")], clock, repeat(3, settle_seconds=2.0))
    assert len(clock.log) == 2 * 2 * (3 * (2 + RUNS_PER_TURN) + WARM_UP_ROUNDS)
    for prepared, ran in zip(clock.log[::2], clock.log[1::2], strict=True):
        assert (prepared.split()[0], ran.split()[0]) == ("prepare", "run")
        assert prepared.split()[1] == ran.split()[1]


def test_a_turn_starts_with_runs_that_are_not_timed() -> None:
    clock = DriftingClock(start=0.001)
    time_in_turns([clock.candidate("a"), clock.candidate("b")], clock, repeat(2, settle_seconds=0.0095))
    runs = [line for line in clock.log if line.startswith("run")][2 * WARM_UP_ROUNDS :]
    turn = 10 + RUNS_PER_TURN
    assert [len(set(runs[start : start + turn])) for start in range(0, len(runs), turn)] == [1, 1, 1, 1]
    assert sorted(runs) == ["run a"] * 2 * turn + ["run b"] * 2 * turn


@pytest.mark.parametrize(("seconds", "head_start"), [(0.0001, True), (0.1, False)])
def test_short_work_waits_for_its_launches(seconds: float, head_start: bool) -> None:
    clock = DriftingClock(start=seconds)
    time_in_turns([clock.candidate("a")], clock, repeat(1))
    assert clock.head_starts == [True] * WARM_UP_ROUNDS + [head_start] * RUNS_PER_TURN


@given(count=st.integers(2, 6), rounds=st.integers(5, 15).map(lambda pairs: 2 * pairs))
def test_a_drifting_clock_hits_all_alike(count: int, rounds: int) -> None:
    clock = DriftingClock(start=1.0, drift=0.01)
    candidates = [clock.candidate(str(index)) for index in range(count)]
    medians = [times.median for times in time_in_turns(candidates, clock, repeat(rounds)).values()]
    # one after the other, the last would be slower by `rounds` drifts or more for each before it
    one_round = 0.01 * count * RUNS_PER_TURN
    assert max(medians) - min(medians) <= one_round


def test_warm_up_is_not_counted() -> None:
    clock = DriftingClock(start=100.0, drift=-1.0)
    times = time_in_turns([clock.candidate("a")], clock, repeat(5))["a"]
    timed = 5 * RUNS_PER_TURN
    assert (times.count, times.median) == (timed, 100.0 - WARM_UP_ROUNDS - (timed - 1) / 2)


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0.0, 12), (25.0, 27), (1000.0, 60)], ids=["at least", "time box", "at most"]
)
def test_repetitions_are_boxed_by_time_and_count(seconds: float, expected: int) -> None:
    clock = DriftingClock()
    box = Repetitions(least=10, most=60, seconds=seconds, settle_seconds=0.0)
    assert time_in_turns([clock.candidate("a")], clock, box)["a"].count == expected


@given(st.lists(st.floats(1e-6, 10), min_size=1, max_size=50))
def test_quantiles_lie_between_their_neighbours_in_order(seconds: list[float]) -> None:
    times, ordered = summarize(seconds), sorted(seconds)
    for share, value in ((0.2, times.low), (0.5, times.median), (0.8, times.high)):
        place = share * (len(ordered) - 1)
        below, above = ordered[int(place)], ordered[min(int(place) + 1, len(ordered) - 1)]
        assert value == pytest.approx(below + (above - below) * (place - int(place)))
    assert times.count == len(seconds)
