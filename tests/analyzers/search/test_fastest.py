"""The fastest recipes for the same training: what is tried, what is listed, and why the next one is not."""

from typing import Any

import pytest

from ligerprof.analyzers.search.budget import Judge, Reserved
from ligerprof.analyzers.search.fastest import CACHE_SHARE, Candidate, Fastest, alternatives, fastest
from ligerprof.analyzers.step_time.account import predicted_time
from ligerprof.errors import UnsupportedError
from ligerprof.models import load_model, spec_from_config
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.recipe.usable_memory import Limit
from ligerprof.units import MIB


def tiny(**options: Any) -> TrainingRecipe:
    return TrainingRecipe(**{"model": "tiny", "batch": 2, "seq": 256, "precision": "bf16", **options})


def search(recipe: TrainingRecipe, limit_bytes: int, **options: Any) -> tuple[Fastest, list[Candidate]]:
    better: list[Candidate] = []
    judge = Judge(Limit(size_bytes=limit_bytes, source="--memory-limit"))
    return fastest(recipe, judge, lambda _text: None, better.append, **options), better


def test_alternatives_train_as_many_sequences_in_the_same_precision() -> None:
    recipe = tiny(batch=2, grad_accum=3, optimizer="sgd", clip=1.0)
    found = list(alternatives(recipe, {}))
    assert recipe in found
    assert {(each.batch, each.grad_accum) for each in found} == {(6, 1), (3, 2), (2, 3), (1, 6)}
    assert {(each.precision, each.optimizer, each.clip, each.seq) for each in found} == {("bf16", "sgd", 1.0, 256)}
    assert {each.checkpointing for each in found} == {True, False}
    assert {each.liger for each in found} == {"none", "all", "no-flce", "flce", "rms,swiglu,flce"}
    assert {each.activation_offload for each in found if each.checkpointing} == {True, False}
    assert len({repr(each) for each in found}) == len(found)


def test_without_a_tight_limit_the_fastest_of_all_is_first() -> None:
    recipe = tiny()
    found, better = search(recipe, 10_000 * MIB)
    least = min(predicted_time(each).seconds for each in alternatives(recipe, {}))
    assert found.found[0].time.seconds == least
    assert found.too_large is None
    assert better[-1] == found.found[0]
    rates = [each.time.tokens_per_second for each in better]
    assert rates == sorted(rates)


def test_under_a_limit_every_answer_fits_and_the_next_faster_one_does_not() -> None:
    recipe = tiny()
    free, _ = search(recipe, 10_000 * MIB, listed=1)
    limit_bytes = free.found[0].verdict.held_bytes - 1
    found, _ = search(recipe, limit_bytes)
    assert found.found
    assert all(each.verdict.fits and each.verdict.held_bytes <= limit_bytes for each in found.found)
    assert found.too_large is not None
    assert not found.too_large.verdict.fits
    assert found.too_large.time.seconds <= found.found[0].time.seconds
    seconds = [each.time.seconds for each in found.found]
    assert seconds == sorted(seconds)


def test_a_plan_of_layers_is_the_answer_where_it_is_the_fastest() -> None:
    spec = spec_from_config({**load_model("llama3.1-8b").config, "num_hidden_layers": 6}, name="six layers")
    options: dict[str, Any] = {"gpu": "h200", "batch": 2, "seq": 8192, "precision": "bf16", "liger": "all"}
    recipe = TrainingRecipe(model=spec, alloc_conf="expandable_segments:True", **options)
    free, _ = search(recipe, 100_000 * MIB, listed=1)
    limit_bytes = free.found[0].verdict.held_bytes * 96 // 100
    found, better = search(recipe, limit_bytes, listed=2)
    first = found.found[0]
    assert "*" in str(first.recipe.selective)
    assert better[-1] == first
    assert first.verdict.held_bytes <= limit_bytes * (1 - CACHE_SHARE)
    judge = Judge(Limit(size_bytes=limit_bytes, source="--memory-limit"))
    least_bytes = int(limit_bytes * (1 - CACHE_SHARE))
    keeping = [each for each in alternatives(recipe, {}) if judge.estimate(each).run.keeps_cache_under(least_bytes)]
    assert min(predicted_time(each).seconds for each in keeping) > first.time.seconds


def test_what_the_simulation_refuses_is_told_and_then_the_next_one() -> None:
    def simulated(recipe: TrainingRecipe) -> Reserved:
        return Reserved(first_bytes=MIB, steady_bytes=MIB, fits=recipe.checkpointing)

    better: list[Candidate] = []
    judge = Judge(Limit(size_bytes=10_000 * MIB, source="--memory-limit"), simulated)
    found = fastest(tiny(), judge, lambda _text: None, better.append, listed=1)
    assert [better[-1]] == list(found.found)
    assert found.found[0].recipe.checkpointing
    refused = [each for each in better if not each.recipe.checkpointing]
    assert refused
    assert {each.verdict.method for each in refused} == {"estimated"}
    assert found.too_large is not None
    assert found.too_large.time.seconds < found.found[0].time.seconds


def test_json_has_flags_and_times_of_each_recipe() -> None:
    found, _ = search(tiny(), 10_000 * MIB, listed=2)
    printed = found.to_json()
    assert [len(printed["recipes"]), printed["limit_bytes"]] == [2, 10_000 * MIB]
    first = printed["recipes"][0]
    assert first["step_seconds"] == found.found[0].time.seconds
    assert (first["fits"], first["time_unknown"]) == (True, None)
    assert "--model" in first["flags"]


def test_a_recipe_without_a_known_time_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="--loss"):
        search(tiny(loss="chunked-nll"), 10_000 * MIB)
