"""The searches against plain loops over everything, with a stand-in for simulated runs that end in any order."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from ligerprof.recipe.commands.changes import Batches, Change, ChangedCommand, Lever
from ligerprof.runs.command_search.largest import CheapestSearch, LargestSearch, Listed, Plan
from ligerprof.runs.command_search.trials import Outcome, Trial

NOTHING = ChangedCommand(words=("train",), environment={}, files={})


def ended(need_bytes: int, limit_bytes: int | None, outcome: Outcome | None = None) -> Trial:
    fits = limit_bytes is None or need_bytes <= limit_bytes
    outcome = outcome or (Outcome.RAN if fits else Outcome.OUT_OF_MEMORY)
    ran = outcome is Outcome.RAN
    return Trial(
        command=NOTHING,
        limit_bytes=limit_bytes,
        outcome=outcome,
        seconds=1.0,
        peak_bytes=need_bytes if ran else 0,
        reserved_bytes=need_bytes if ran else 0,
        reason="broken" if outcome is Outcome.FAILED else "",
    )


def run_all(
    draw: random.Random,
    at_once: int,
    wanted: Callable[[int], list],
    is_open: Callable[[Any], bool],
    run: Callable[[Any], Trial],
    note: Callable[[Any, Trial], None],
) -> int:
    """Run what is wanted, several at a time, ending in any order; returns how many runs ended."""
    count, running = 0, []
    while chosen := wanted(at_once):
        assert len(set(chosen)) == len(chosen) <= at_once
        running = [each for each in running if is_open(each)]
        running += [each for each in chosen if each not in running][: at_once - len(running)]
        each = running.pop(draw.randrange(len(running)))
        note(each, run(each))
        count += 1
        assert count < 60
    return count


@pytest.mark.parametrize("seed", range(40))
def test_the_largest_batch_is_that_of_a_loop_over_all(seed: int) -> None:
    draw = random.Random(seed)
    batch, accumulation = draw.choice([1, 2, 3, 4, 8, 16, 30]), draw.choice([1, 1, 2, 6])
    accumulates = draw.random() < 0.7
    batches = Batches(
        key="batch",
        batch=batch,
        accumulation_key="accumulation" if accumulates else None,
        accumulation=accumulation if accumulates else 1,
        multiple=draw.choice([1, 1, batch * accumulation]) if accumulates else 1,
    )
    fixed, each, limit_bytes = draw.randrange(1000), draw.randrange(1, 300), draw.randrange(100, 5000)
    # an optimizer's peak, below which few sequences do not show
    floor = draw.choice([0, fixed + each * draw.randrange(1, 32)])

    def need(value: int) -> int:
        return max(fixed + each * value, floor)

    search = LargestSearch(axis=batches, start=batches.index(batch), limit_bytes=limit_bytes)
    at_once = draw.choice([1, 2, 3, 8])
    count = run_all(
        draw,
        at_once,
        search.wanted,
        lambda key: search.is_open(*key),
        lambda key: ended(need(batches.at(key[0])), key[1]),
        search.known.__setitem__,
    )
    fitting = [index for index in range(5000) if need(batches.at(index)) <= limit_bytes]
    assert search.largest == (max(fitting) if fitting else None)
    assert search.failing == (max(fitting) + 1 if fitting else 0)
    assert search.plateau is None
    assert count <= 24


@pytest.mark.parametrize("seed", range(20))
def test_the_largest_of_given_values(seed: int) -> None:
    draw = random.Random(seed)
    values = sorted(draw.sample(range(1, 500), draw.randrange(1, 9)))
    limit_bytes = draw.randrange(600)
    search = LargestSearch(
        axis=Listed(values), start=draw.randrange(len(values)), limit_bytes=limit_bytes, count=len(values)
    )
    run_all(
        draw,
        2,
        search.wanted,
        lambda key: search.is_open(*key),
        lambda key: ended(values[key[0]], key[1]),
        search.known.__setitem__,
    )
    fitting = [index for index, value in enumerate(values) if value <= limit_bytes]
    assert search.is_done
    assert search.largest == max(fitting, default=None)


def test_a_program_without_more_data_ends_the_search() -> None:
    batches = Batches(key="batch", batch=2, accumulation_key=None, accumulation=1)
    search = LargestSearch(axis=batches, start=1, limit_bytes=10_000)
    run_all(
        random.Random(0),
        2,
        search.wanted,
        lambda key: search.is_open(*key),
        lambda key: ended(100 * min(batches.at(key[0]), 50), key[1]),
        search.known.__setitem__,
    )
    assert search.is_done
    assert search.plateau is not None
    assert batches.at(search.plateau) >= 50


def slow_plan(count: int, fits: Callable[[Plan], bool], usable: list[int]) -> Plan | None:
    """The shortest beginning that fits, without what it does not need, the most expensive first."""
    for length in range(len(usable) + 1):
        plan = tuple(usable[:length])
        if fits(plan):
            for number in reversed(plan[:-1]):
                without = tuple(each for each in plan if each != number)
                plan = without if fits(without) else plan
            return plan
    return None


@pytest.mark.parametrize("seed", range(40))
def test_the_cheapest_plan_is_that_of_a_loop_over_all(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randrange(0, 10)
    savings = [draw.choice([0, 0, draw.randrange(100), draw.randrange(400)]) for _ in range(count)]
    broken = {number for number in range(count) if draw.random() < 0.1}
    # a lever may replace the value of an earlier one
    keys = [f"key{draw.randrange(number, count) if draw.random() < 0.2 else number}" for number in range(count)]
    levers = [Lever(name=key, cost="", change=Change(keys={key: number})) for number, key in enumerate(keys)]
    need_bytes, limit_bytes = draw.randrange(900), draw.randrange(600)

    def outcome(change: Change) -> Trial:
        pulled = set(change.keys.values())
        if pulled & broken:
            return ended(0, limit_bytes, Outcome.FAILED)
        return ended(need_bytes - sum(savings[number] for number in pulled), limit_bytes)

    search = CheapestSearch(levers=levers)
    at_once = draw.choice([1, 2, 4])
    run_all(draw, at_once, search.wanted, search.is_open, outcome, search.note)
    assert set(search.refused) <= broken
    usable = [number for number in range(count) if number not in search.refused]

    def fits(plan: Plan) -> bool:
        return outcome(search.change(plan)).outcome is Outcome.RAN

    plan = search.plan
    if plan is not None:
        assert fits(plan)
        # none of its levers is without effect
        for number in plan[:-1]:
            without = tuple(each for each in plan if each != number)
            assert not fits(without)
    if len(set(keys)) == count:
        # each lever helps or does nothing, whatever else is pulled
        assert plan == slow_plan(count, fits, usable)
    assert set(plan or ()).isdisjoint(broken - {number for number in range(count) if keys.count(keys[number]) > 1})
