import math
import statistics
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.turns import Contest, Turns, compare_in_turns, median_interval

WARM_UP_RUNS = 2


class Chip:
    """A device that gets slower with work and faster with rest, whose runs are written down."""

    def __init__(self, work: dict[str, float], *, drift: float = 0.0) -> None:
        self.work, self.drift, self.slowness = work, drift, 1.0
        self.log: list[str] = []
        self.wall = 0.0

    def run(self, name: str) -> Callable[[], None]:
        def call() -> None:
            self.log.append(name)
            self.wall += self.work[name] * self.slowness
            self.slowness *= 1 + self.drift

        return call

    def time(self, run: Callable[[], object], *, head_start: bool) -> Callable[[], float]:
        assert not head_start
        before = self.wall
        run()
        taken = self.wall - before
        self.log[-1] += " timed"
        return lambda: taken

    def now(self) -> float:
        return self.wall


def contests(chip: Chip, *names: str, references: tuple[str, ...] = ("floor",)) -> list[Contest]:
    return [Contest(name=name, run=chip.run(name), references=references) for name in names]


def after_warm_up(chip: Chip) -> list[str]:
    return chip.log[WARM_UP_RUNS * len(chip.work) :]


def test_each_run_of_a_candidate_lies_between_its_references() -> None:
    chip = Chip({"floor": 1.0, "bound": 1.0, "own": 3.0})
    found = compare_in_turns(
        contests(chip, "own", references=("floor", "bound")),
        {name: chip.run(name) for name in ("floor", "bound")},
        chip,
        Turns(rounds=2, runs=2, settle_seconds=3.0),
    )["own"]
    expected: list[str] = []
    for names in (["floor", "bound"], ["bound", "floor"]):
        expected += names * 2 + [f"{name} timed" for name in (*names, *("own", *names) * 2)]
    assert after_warm_up(chip) == expected
    assert found.seconds == pytest.approx((3.0,) * 4)
    assert {name: len(seconds) for name, seconds in found.reference_seconds.items()} == {"floor": 6, "bound": 6}
    assert found.shares == {"floor": pytest.approx((1 / 3, 1 / 3)), "bound": pytest.approx((1 / 3, 1 / 3))}


def test_slow_candidates_run_less_often() -> None:
    chip = Chip({"floor": 1.0, "slow": 2.0})
    found = compare_in_turns(
        contests(chip, "slow"), {"floor": chip.run("floor")}, chip, Turns(rounds=3, runs=4, slow_runs=1)
    )["slow"]
    assert (len(found.seconds), len(found.reference_seconds["floor"])) == (3, 6)


@given(drift=st.floats(-0.02, 0.02), own=st.floats(0.3, 5.0), rounds=st.integers(1, 6))
def test_shares_do_not_depend_on_a_drifting_clock(drift: float, own: float, rounds: int) -> None:
    chip = Chip({"floor": 1.0, "before": 7.0, "own": own}, drift=drift)
    found = compare_in_turns(contests(chip, "before", "own"), {"floor": chip.run("floor")}, chip, Turns(rounds=rounds))
    # the mean of two neighbors of a geometric series is larger than the middle by the square of the drift
    assert found["own"].shares["floor"] == pytest.approx((1 / own,) * rounds, rel=1.1 * drift**2 + 1e-9)


@given(count=st.integers(1, 5), rounds=st.integers(1, 5))
def test_each_candidate_has_one_turn_per_round_and_is_observed_in_each(count: int, rounds: int) -> None:
    names = [str(index) for index in range(count)]
    chip = Chip({"floor": 1.0, **dict.fromkeys(names, 1.5)})
    seen = iter(range(count * rounds))
    found = compare_in_turns(
        contests(chip, *names), {"floor": chip.run("floor")}, chip, Turns(rounds=rounds), lambda: next(seen)
    )
    for number in range(rounds):
        assert sorted(one.conditions[number] // count for one in found.values()) == [number] * count
    assert all(len(one.shares["floor"]) == rounds for one in found.values())


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=40))
def test_the_interval_covers_the_median_with_its_confidence(values: list[float]) -> None:
    found = median_interval(values)
    count, ordered = len(values), sorted(values)
    assert found.low <= found.median == statistics.median(values) <= found.high
    # the chance that at most `below` of the values are below the true median
    chances = [sum(math.comb(count, i) for i in range(below + 1)) / 2**count for below in range(count)]
    kept = [cut for cut in range(count // 2 + 1) if 2 * chances[min(cut, count - 1)] <= 0.05]
    cut = max(kept, default=0)
    assert (found.low, found.high) == (ordered[cut], ordered[count - 1 - cut])
    assert found.confidence == pytest.approx(max(0.0, 1 - 2 * chances[cut]))
    assert found.confidence >= 0.95 or count < 6
