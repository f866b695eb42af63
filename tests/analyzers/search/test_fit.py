import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ligerprof.analyzers.estimate import Moment, estimate
from ligerprof.analyzers.search.budget import Judge, Reserved, Verdict
from ligerprof.analyzers.search.fit import SEQ_STEP, Fit, find_border, fit
from ligerprof.errors import RecipeError, UnsupportedError
from ligerprof.models import spec_from_config
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.recipe.usable_memory import Limit, find_limit
from ligerprof.reports.search import answer_line, describe_verdict
from ligerprof.units import GIB, MIB
from tests.estimated import needed_bytes

MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}
STUDY = {
    "seq": 1024,
    "engine": "deepspeed",
    "precision": "mixed-fp16",
    "zero": 3,
    "offload": "all",
    "memory_limit_bytes": int(23.5 * GIB),
}


def silent(_text: str) -> None:
    pass


def limited(size_bytes: int) -> Limit:
    return Limit(size_bytes=size_bytes, source="a test")


def reserving(extra_bytes: Callable[[TrainingRecipe], int]) -> Callable[[TrainingRecipe], Reserved]:
    """A fake simulator that reserves `extra_bytes` more than the estimate."""

    def check(recipe: TrainingRecipe) -> Reserved:
        assert recipe.memory_limit_bytes is not None, "the simulation runs under the limit"
        reserved_bytes = needed_bytes(recipe) + extra_bytes(recipe)
        fits = reserved_bytes <= recipe.memory_limit_bytes
        return Reserved(first_bytes=0, steady_bytes=reserved_bytes, fits=fits)

    return check


def refuses(recipe: TrainingRecipe) -> Reserved:
    raise UnsupportedError(f"simulate: {recipe.engine} is not built yet.")


@given(st.integers(0, 3000), st.integers(1, 3000), st.one_of(st.none(), st.integers(1, 3000)))
def test_find_border_is_the_last_count_that_fits_wherever_it_starts(border: int, start: int, most: int | None) -> None:
    tried: list[int] = []

    def fits(count: int) -> bool:
        tried.append(count)
        return count <= border

    found = find_border(fits, start=start, most=most)

    assert found == (border if most is None else min(border, most))
    assert min(tried) >= 1
    assert most is None or max(tried) <= most


@pytest.mark.parametrize("error", [-1, 0, 1])
def test_a_border_next_to_the_guess_takes_no_more_than_the_border_and_its_neighbors(error: int) -> None:
    tried: list[int] = []

    def fits(count: int) -> bool:
        tried.append(count)
        return count <= 10

    assert find_border(fits, start=10 + error, most=None) == 10
    assert sorted(tried) == sorted({10 + error, 10, 11})


def verdict_at(found: Fit, judge: Judge, batch: int, seq: int) -> Verdict:
    return judge.verdict(dataclasses.replace(found.recipe, batch=batch, seq=seq))


def assert_is_at_the_border(found: Fit, judge: Judge) -> None:
    """Check that every answer fits and the next larger value does not, by the same judge."""
    batch_points = [point for point in (found.batch, *found.frontier) if point is not None]
    for point in batch_points:
        assert verdict_at(found, judge, point.batch, point.seq).fits
        assert not verdict_at(found, judge, point.batch + 1, point.seq).fits
    if found.batch is None:
        assert not verdict_at(found, judge, 1, found.recipe.seq).fits
    if found.seq is not None:
        assert verdict_at(found, judge, found.seq.batch, found.seq.seq).fits
        assert (found.seq.seq - found.recipe.seq) % SEQ_STEP == 0
        if found.seq.bounded_by == "memory":
            assert not verdict_at(found, judge, found.seq.batch, found.seq.seq + SEQ_STEP).fits
        else:
            assert found.seq.seq + SEQ_STEP > found.recipe.spec.max_positions


@settings(max_examples=3)
@given(
    limit_bytes=st.integers(30 * MIB, 2 * GIB),
    seq=st.integers(16, 512),
    liger=st.sampled_from(["none", "all", "flce"]),
    checkpointing=st.booleans(),
    overhead=st.one_of(st.none(), st.floats(0, 0.5)),
)
def test_answers_fit_and_one_more_does_not(
    limit_bytes: int, seq: int, liger: str, checkpointing: bool, overhead: float | None
) -> None:
    recipe = TrainingRecipe(model="tiny", seq=seq, liger=liger, checkpointing=checkpointing, precision="bf16")
    check = None if overhead is None else reserving(lambda recipe: int(overhead * needed_bytes(recipe)))
    judge = Judge(limited(limit_bytes), check)

    found = fit(recipe, judge, silent)

    assert_is_at_the_border(found, judge)
    assert found.wanted.fits == judge.verdict(recipe).fits
    assert (found.settings is None) == bool(found.wanted.fits)
    checked = "closed form" if overhead is None else "simulated"
    assert {point.verdict.checked for point in (found.batch, found.seq, *found.frontier) if point} <= {checked}


@pytest.mark.slow
@settings(max_examples=3)
@given(st.lists(st.integers(30 * MIB, 2 * GIB), min_size=2, max_size=2).map(sorted), st.sampled_from(["none", "all"]))
def test_a_higher_limit_never_lowers_an_answer(limits: list[int], liger: str) -> None:
    recipe = TrainingRecipe(model="tiny", liger=liger, precision="bf16")

    less, more = (fit(recipe, Judge(limited(limit_bytes), None), silent) for limit_bytes in limits)

    assert (less.batch.batch if less.batch else 0) <= (more.batch.batch if more.batch else 0)
    assert (less.seq.seq if less.seq else 0) <= (more.seq.seq if more.seq else 0)
    assert len(less.frontier) <= len(more.frontier)


@pytest.mark.slow
def test_the_study_s_border_on_a_24_gb_card() -> None:
    plain = TrainingRecipe(**STUDY)
    fused = TrainingRecipe(**STUDY, liger="all")

    found = [fit(recipe, Judge(find_limit(recipe), refuses), silent) for recipe in (plain, fused)]

    # measured on one H200 limited to 23.5 GiB: 8 runs and 16 does not; with kernels 112 runs
    assert found[0].batch is not None
    assert found[1].batch is not None
    assert 8 <= found[0].batch.batch <= 15
    assert found[1].batch.batch >= 112
    assert found[0].batch.verdict.checked == "closed form"
    assert found[0].notes == ("not simulated: simulate: deepspeed is not built yet.",)


@pytest.mark.parametrize(("options", "rows"), [({}, 5), ({"batch": 20}, 5), ({"packing": True}, 2)])
def test_a_batch_ends_with_the_sequences_of_the_file(options: dict[str, Any], rows: int, tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("100\n20\n60\n9000\n30\n", encoding="utf-8")
    recipe = TrainingRecipe(model="tiny", seq=256, lengths=str(path), **options)

    found = fit(recipe, Judge(limited(200 * MIB), reserving(lambda _recipe: 3 * MIB)), silent)

    assert found.batch is not None
    assert (found.batch.batch, found.batch.bounded_by) == (rows, "sequences")


def test_each_recipe_is_simulated_once() -> None:
    recipe = TrainingRecipe(model="tiny", seq=128)
    simulated: list[tuple[int, int]] = []

    def check(recipe: TrainingRecipe) -> Reserved:
        simulated.append((recipe.batch, recipe.seq))
        return reserving(lambda _recipe: 3 * MIB)(recipe)

    found = fit(recipe, Judge(limited(200 * MIB), check), silent)

    assert found.batch is not None
    assert len(simulated) == len(set(simulated))
    assert {(found.batch.batch, 128), (found.batch.batch + 1, 128)} <= set(simulated)


def test_announced_recipes_are_judged_and_their_number_falls_to_none() -> None:
    recipe = TrainingRecipe(model="tiny", seq=128)
    announced: dict[tuple[int, int], None] = {}
    judged: list[tuple[int, int]] = []
    left: list[int] = []

    def check(recipe: TrainingRecipe) -> Reserved:
        judged.append((recipe.batch, recipe.seq))
        run = estimate(recipe).run
        return Reserved(first_bytes=0, steady_bytes=0, fits=run.completes_under(200 * MIB))

    def expect(recipes: Sequence[TrainingRecipe]) -> None:
        assert {each.memory_limit_bytes for each in recipes} <= {200 * MIB}
        announced.update(dict.fromkeys((each.batch, each.seq) for each in recipes))

    fit(recipe, Judge(limited(200 * MIB), check, expect), silent, left.append)

    # the estimate of such a simulation is exact; what may fit beyond a failure through fragmentation is not announced
    assert set(announced) <= set(judged)
    assert [each for each in judged if each in announced] == list(announced)
    assert left == list(range(len(announced), -1, -1))


def test_a_failure_through_fragmentation_does_not_end_the_search() -> None:
    recipe = TrainingRecipe(model="tiny", seq=128)

    def check(recipe: TrainingRecipe) -> Reserved:
        return Reserved(first_bytes=0, steady_bytes=0, fits=recipe.batch in (*range(23), 24, 25, 26))

    found = fit(recipe, Judge(limited(400 * MIB), check), silent)

    assert found.batch is not None
    # 23 is tried only if the search comes from below
    assert found.batch.batch == 26
    assert found.batch.fragmented in ((), (23,))
    point = dataclasses.replace(found.batch, fragmented=(23,))
    assert answer_line(recipe, "batch", point).endswith("; 23 fails through fragmentation")


def test_an_architecture_without_estimate_is_searched_by_simulation() -> None:
    recipe = TrainingRecipe(model=spec_from_config(MIXTRAL, name="experts"), seq=64)

    def check(recipe: TrainingRecipe) -> Reserved:
        return Reserved(first_bytes=recipe.tokens * 10_000, steady_bytes=0, fits=True)

    judge = Judge(limited(64 * 11 * 10_000), check)
    found = fit(recipe, judge, silent)

    assert found.batch is not None
    assert found.batch.batch == 11
    assert found.seq is not None
    assert found.seq.seq == 128
    assert found.settings is None


def test_no_batch_and_no_sequence_fit_where_the_weights_do_not() -> None:
    found = fit(TrainingRecipe(), Judge(limited(GIB), None), silent)

    assert (found.batch, found.seq, found.frontier) == (None, None, ())
    assert found.settings is not None


@pytest.mark.parametrize(
    ("options", "limit_bytes", "source"),
    [
        ({"memory_limit_bytes": 24 * GIB}, 24 * GIB, "--memory-limit"),
        ({"gpu": "t4"}, TrainingRecipe(gpu="t4").gpu_spec.usable_bytes, "Tesla T4 less the CUDA context"),
        # a limit that leaves no room for the context
        (
            {"gpu": "t4", "memory_limit_bytes": TrainingRecipe(gpu="t4").gpu_spec.memory_bytes},
            TrainingRecipe(gpu="t4").gpu_spec.usable_bytes,
            "Tesla T4 less the CUDA context",
        ),
    ],
    ids=["given", "gpu", "both"],
)
def test_the_limit_is_the_given_one_or_what_the_gpu_leaves(
    options: dict[str, object], limit_bytes: int, source: str
) -> None:
    limit = find_limit(TrainingRecipe(**options))  # type: ignore[arg-type]
    assert (limit.size_bytes, limit.source) == (limit_bytes, source)


def test_a_limit_above_the_gpu_is_refused() -> None:
    with pytest.raises(RecipeError, match="more than Tesla T4 has"):
        find_limit(TrainingRecipe(gpu="t4", memory_limit_bytes=24 * GIB))


def test_a_verdict_names_the_moment_that_decides() -> None:
    recipe = TrainingRecipe(model="tiny", eval_batch=4096)
    estimated = Judge(limited(64 * GIB), None).verdict(recipe)
    assert estimated.decided_by is Moment.EVALUATION
    assert "in the evaluation (estimated)" in describe_verdict(estimated)

    def in_second(_: TrainingRecipe) -> Reserved:
        return Reserved(first_bytes=5 * MIB, steady_bytes=6 * MIB, second_bytes=9 * MIB, fits=True)

    def fails(_: TrainingRecipe) -> Reserved:
        return Reserved(first_bytes=9 * MIB, steady_bytes=6 * MIB, fits=False, failed_in="evaluation")

    def in_a_run(_: TrainingRecipe) -> Reserved:
        return Reserved(first_bytes=0, steady_bytes=6 * MIB, fits=True, run_step=1317)

    second, failed, run = (Judge(limited(10 * MIB), check).verdict(recipe) for check in (in_second, fails, in_a_run))
    assert second.to_json()["decided_by"] == "second step"
    assert second.held_bytes == 9 * MIB
    assert describe_verdict(failed) == "DOES NOT FIT: out of memory in the evaluation (simulated)"
    assert describe_verdict(run) == "fits: 6.0 MiB reserved in step 1,317 of the run (simulated)"
    assert run.to_json()["run_step"] == 1317
