import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ligerprof.errors import RecipeError
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.sweep.cells import Grid, cell_key, describe, distinguishing_options, expand
from ligerprof.runs.sweep.runner import largest_fitting

TINY = {"model": ("tiny",)}


def anything_runs(_recipe: TrainingRecipe) -> None:
    pass


def recipes(**options: tuple[object, ...]) -> tuple[TrainingRecipe, ...]:
    return expand([Grid(options={**TINY, **options})], anything_runs)[0]


def test_sizes_ascend_and_kernels_vary_fastest() -> None:
    cells = recipes(
        liger=("none", "all"), provider=("ligerprof", "torch"), seq=(64, 32), batch=(4, 1), precision=("amp", "bf16")
    )
    order = [(cell.precision, cell.batch * cell.seq, cell.liger, cell.provider) for cell in cells]
    sizes = [32, 64, 128, 256]
    kernels = [("none", "ligerprof"), ("all", "ligerprof"), ("all", "torch")]
    assert order == [
        (precision, size, *kernel) for precision, size, kernel in itertools.product(("amp", "bf16"), sizes, kernels)
    ]


def test_a_grid_of_too_many_combinations_is_refused_at_once() -> None:
    sizes = tuple(range(1, 1001))
    grid = Grid(options={**TINY, "batch": sizes, "seq": sizes}, variants=({}, {"liger": "all"}))
    assert grid.size == 2_000_000
    with pytest.raises(RecipeError, match="2,000,000 combinations, more than 100,000"):
        expand([grid], anything_runs)


def test_a_cell_that_does_not_use_an_option_runs_once() -> None:
    assert len(recipes(provider=("ligerprof", "torch", "liger"), flce_budget=("lean", "balanced"))) == 1
    assert len(recipes(liger=("rms",), provider=("ligerprof", "liger"), flce_budget=("lean", "balanced"))) == 2
    assert len(recipes(liger=("flce",), provider=("ligerprof", "liger"), flce_budget=("lean", "balanced"))) == 4


def test_combinations_that_cannot_be_trained_are_refused_and_the_others_expand() -> None:
    def no_bf16(recipe: TrainingRecipe) -> None:
        if recipe.precision == "bf16":
            raise RecipeError("no bf16 here")

    grid = Grid(options={**TINY, "loss": ("hf", "hf-4.45"), "liger": ("none", "flce"), "precision": ("amp", "bf16")})
    cells, refusals = expand([grid], no_bf16)
    assert [(cell.loss, cell.liger) for cell in cells] == [("hf", "none"), ("hf", "flce"), ("hf-4.45", "none")]
    assert {refusal.reason for refusal in refusals if refusal.options["precision"] == "bf16"} >= {"no bf16 here"}
    assert len(refusals) == 5


def test_the_key_covers_the_whole_recipe_and_survives_json() -> None:
    recipe = TrainingRecipe(model="tiny", liger="rms+rope", memory_limit_bytes=2**30)
    assert cell_key(TrainingRecipe.from_json(recipe.to_json())) == cell_key(recipe)
    changed = [
        dataclasses.replace(recipe, batch=5),
        dataclasses.replace(recipe, memory_limit_bytes=None),
        dataclasses.replace(recipe, provider="torch"),
        dataclasses.replace(recipe, model="llama3.2-1b"),
        dataclasses.replace(recipe, repeats=3),
    ]
    assert len({cell_key(item) for item in (recipe, *changed)}) == 6


def test_keys_in_files_stay_valid() -> None:
    # cells must keep their keys when a later version adds an option
    assert cell_key(TrainingRecipe(model="tiny", batch=2, liger="all")) == "30b7bb01d1d80cbb"


def test_descriptions_name_only_options_that_distinguish_cells() -> None:
    first = TrainingRecipe(model="tiny", liger="rms")
    limited = dataclasses.replace(first, memory_limit_bytes=2**30, clip=1.0)
    assert distinguishing_options([first, dataclasses.replace(first, batch=1)]) == ("batch", "seq", "liger", "provider")
    # options that differ are shown; the others are not
    shown = distinguishing_options([first, limited, dataclasses.replace(limited, clip=None)])
    assert shown[4:] == ("clip", "memory_limit_bytes")
    assert describe(limited, shown) == "4 x 1024, rms (ligerprof), clip 1.0, limit 1024.0 MiB"
    other = dataclasses.replace(first, model="llama3.2-1b", batch=1)
    assert describe(other, distinguishing_options([first, other])) == "1 x 1024, rms (ligerprof), llama3.2-1b"


@given(
    border=st.integers(0, 300),
    guess=st.integers(1, 400),
    unit=st.sampled_from([1, 4, 64]),
    known=st.tuples(st.booleans(), st.booleans()),
    shares=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_the_largest_fitting_value_is_found_from_any_start(
    border: int, guess: int, unit: int, known: tuple[bool, bool], shares: tuple[float, float]
) -> None:
    asked: list[int] = []

    def fits(value: int) -> bool:
        asked.append(value)
        return value <= border * unit

    low = int(shares[0] * border) * unit if known[0] else 0
    high = (border + 1 + int(shares[1] * 50)) * unit if known[1] else None
    found = largest_fitting(fits, guess * unit, unit, (low or None, high))
    assert found == (border * unit or None)
    assert len(set(asked)) == len(asked)
    assert all(value % unit == 0 and value > low for value in asked)
    # strides double, then halve
    assert len(asked) <= 24
