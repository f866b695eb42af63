from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from ligerprof.recipe.categories import Axis
from ligerprof.recipe.lengths import BatchShape
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.simulated import memo
from ligerprof.runs.simulated.internals import call
from ligerprof.runs.simulated.tracing import step_tracer
from tests.drawn_recipes import draw_recipe


def without_memo(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return func(*args, **kwargs)


def traced(recipe: TrainingRecipe) -> list[tuple[int, int]]:
    """The events of a build, a micro-batch and an update."""
    with step_tracer(recipe) as tracer:
        tracer.micro_batch(BatchShape(rows=recipe.batch, tokens=recipe.seq))
        tracer.update()
        return tracer.take()


@pytest.mark.parametrize("seed", range(4))
def test_passes_have_the_same_events_as_without_remembered_results(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = replace(draw_recipe(Random(seed)), engine="torch", gpus=1, padding=0.0, packing=False, offload="none")
    # passes after those of other shapes, which share the results of the weights
    traced(recipe.resized(Axis.BATCH, recipe.batch + 1))
    found = traced(recipe)
    monkeypatch.setattr(call, "compute", without_memo)
    assert found == traced(recipe)


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
    traced(recipe)
    monkeypatch.setattr(call, "compute", count("compute", memo.compute))
    monkeypatch.setattr(memo, "_make", count("_make", memo._make))
    traced(recipe)
    assert counts["_make"] > 0.95 * counts["compute"]
