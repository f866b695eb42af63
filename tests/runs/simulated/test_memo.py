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
    bare = simulate_step(recipe, record=False)
    for each in (found, bare):
        assert (each.peak_bytes, each.reserved_bytes) == (expected.peak_bytes, expected.reserved_bytes)


def test_equal_numbers_of_different_types_are_different_arguments() -> None:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        ids = torch.zeros(4, dtype=torch.int64)
        for _ in range(3):
            dtypes = [memo.compute(torch.ops.aten.mul.Scalar, (ids, number), {}).dtype for number in (1, 1.0)]
            assert dtypes == [torch.int64, torch.float32]


def test_results_that_share_memory_with_arguments_do_so_when_remembered() -> None:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    aten = torch.ops.aten
    with FakeTensorMode():
        for _ in range(3):
            base = torch.zeros(4, 6)
            assert memo.compute(aten.fill_.Scalar, (base, 2.0), {}) is base
            column = memo.compute(aten.slice.Tensor, (base, 1, 2, 3), {})
            assert (column.shape, column.stride(), column.storage_offset()) == ((4, 1), (6, 1), 2)
            assert column.untyped_storage()._cdata == base.untyped_storage()._cdata
            joined = memo.compute(aten.cat.default, ([base, column], 1), {})
            assert joined.untyped_storage().nbytes() == 4 * 7 * 4
            # an operator without tensors
            made = memo.compute(aten.zeros.default, ([2, 3],), {"dtype": torch.int64, "device": torch.device("cpu")})
            assert (made.shape, made.dtype, made.untyped_storage().nbytes()) == ((2, 3), torch.int64, 48)


def test_remembered_results_have_every_attribute_of_a_fake_tensor() -> None:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        source = torch.zeros(4, 6)
        first, *_, last = [memo.compute(torch.ops.aten.neg.default, (source,), {}) for _ in range(4)]
    assert vars(last) == vars(first)
    assert torch._C._dispatch_key_set(last) == torch._C._dispatch_key_set(first)
    assert (last.device, last.is_leaf, last.requires_grad) == (first.device, first.is_leaf, first.requires_grad)


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
    assert counts["_make"] > 0.95 * counts["compute"]
