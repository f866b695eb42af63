"""Layers that the estimate runs once, written out for the replay: as if each of them had run."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis.errors import UnsatisfiedAssumption

from ligerprof.analyzers.estimate import estimate, traced
from ligerprof.analyzers.estimate.replayed import EstimatedRun
from ligerprof.analyzers.estimate.traced import Repetition
from ligerprof.errors import LigerprofError
from ligerprof.models import load_model, spec_from_config
from ligerprof.recipe.training import TrainingRecipe
from tests.drawn_recipes import draw_rank_recipe, draw_recipe
from tests.estimated import fresh

# of reserved bytes
TOLERANCE = 0.005


def run_of(options: dict[str, Any]) -> EstimatedRun:
    config = {**load_model("tiny").config, "num_hidden_layers": 9, "hidden_size": 512, "intermediate_size": 1408}
    model = spec_from_config({**config, "head_dim": 64, "num_attention_heads": 8}, name="deep")
    return fresh(TrainingRecipe(model=model, seq=512, **options)).run


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"checkpointing": False, "grad_accum": 3},
        {"reentrant": True},
        {"lora": 8, "precision": "bf16-amp"},
        {"engine": "fsdp2", "gpus": 2, "precision": "mixed"},
        {"engine": "ddp", "gpus": 2},
        {"checkpointing": False, "attention": "eager", "alloc_conf": "expandable_segments:True"},
    ],
    ids=str,
)
def test_folded_layers_reserve_as_much_as_all_of_them(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    folded = run_of(options)
    monkeypatch.setattr(traced, "_longest_repetition", lambda _kinds, first: Repetition(first))
    whole = run_of(options)

    assert folded.reserved_bytes == pytest.approx(whole.reserved_bytes, rel=TOLERANCE)
    assert sum(len(one.events) for one in folded.recordings) < sum(len(one.events) for one in whole.recordings)
    for one, other in zip(folded.recordings, whole.recordings, strict=True):
        unfolded = one.unfolded()
        assert sorted(unfolded.sizes) == sorted(other.sizes)
        assert len(unfolded.events) == len(other.events)


def deep_recipes() -> Iterator[TrainingRecipe]:
    """Drawn recipes, every third under FSDP2 or DDP, of models with nine layers."""
    for number in range(1, 1000):
        with suppress(LigerprofError, UnsatisfiedAssumption):
            draw = draw_recipe if number % 3 else draw_rank_recipe
            recipe = draw(Random(f"folded {number}"))
            config = {key: value for key, value in recipe.spec.config.items() if key != "layer_types"}
            layers = "n_layer" if "n_layer" in config else "num_hidden_layers"
            recipe = replace(recipe, model=spec_from_config({**config, layers: 9}, name="deep"))
            estimate(recipe)
            yield recipe


@pytest.mark.parametrize("count", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_drawn_recipes_reserve_as_much_folded(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = [recipe for recipe, _ in zip(deep_recipes(), range(count), strict=False)]
    folded = [fresh(recipe).run for recipe in recipes]
    monkeypatch.setattr(traced, "_longest_repetition", lambda _kinds, first: Repetition(first))
    for recipe, run in zip(recipes, folded, strict=True):
        whole = fresh(recipe).run
        assert run.reserved_bytes == pytest.approx(whole.reserved_bytes, rel=TOLERANCE), recipe
        assert sum(len(one.events) for one in run.recordings) < sum(len(one.events) for one in whole.recordings)


def test_a_run_completes_under_less_than_it_reserves_without_a_limit_and_not_under_what_it_allocates() -> None:
    run = estimate(TrainingRecipe(model="llama3.2-1b")).run

    assert run.completes_under(run.reserved_bytes)
    assert run.completes_under(int(0.95 * run.reserved_bytes))
    assert not run.completes_under(run.peak_bytes(run.steady) - 1)
