from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import pytest

from ligerprof.recipe.categories import Axis
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.outcome import StepOutcome
from ligerprof.runs.simulated import memo, simulate_step
from ligerprof.runs.simulated.internals import call
from tests.drawn_recipes import draw_recipe


def without_memo(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return func(*args, **kwargs)


def events(outcome: StepOutcome) -> list[tuple[Any, ...]]:
    """Action, address, size and stamp of every event."""
    (trace,) = outcome.snapshot["device_traces"]
    return [tuple(value for key, value in event.items() if key != "frames") for event in trace]


@pytest.mark.parametrize("seed", range(4))
def test_a_simulation_has_the_same_events_as_without_remembered_results(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = draw_recipe(Random(seed))
    other = recipe.resized(Axis.BATCH, recipe.batch + 1)
    # a simulation after one of other shapes, which shares the results of the weights
    simulate_step(other, record=False)
    found = simulate_step(recipe)
    monkeypatch.setattr(call, "compute", without_memo)
    expected = simulate_step(recipe)
    assert events(found) == events(expected)
    assert (found.peak_bytes, found.reserved_bytes) == (expected.peak_bytes, expected.reserved_bytes)


def test_equal_numbers_of_different_types_are_different_arguments() -> None:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        ids = torch.zeros(4, dtype=torch.int64)
        for _ in range(3):
            dtypes = [memo.compute(torch.ops.aten.mul.Scalar, (ids, number), {}).dtype for number in (1, 1.0)]
            assert dtypes == [torch.int64, torch.float32]


def test_most_operators_of_repeated_layers_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"compute": 0, "_make": 0}

    def count(name: str, function: Any) -> Any:
        def counted(*arguments: Any) -> Any:
            counts[name] += 1
            return function(*arguments)

        return counted

    recipe = TrainingRecipe(model="tiny", seq=96)
    simulate_step(recipe, record=False)
    monkeypatch.setattr(call, "compute", count("compute", memo.compute))
    monkeypatch.setattr(memo, "_make", count("_make", memo._make))
    simulate_step(recipe, record=False)
    assert counts["_make"] > 0.7 * counts["compute"]
