"""A whole run against the same steps, each simulated with the model's code on one allocator."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest

from ligerprof.analyzers.estimate import Moment
from ligerprof.errors import UnsupportedError
from ligerprof.library import make_judge
from ligerprof.recipe.lengths import BatchShape, run_shapes
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.outcome import Progress
from ligerprof.runs.simulated.worker import worker
from ligerprof.runs.whole_run import replay, simulate
from ligerprof.runs.whole_run.replay import WholeRun
from ligerprof.runs.whole_run.simulate import simulate_run, step_tracer
from ligerprof.torch_memory.allocator.states import AllocatorState
from ligerprof.units import MIB
from tests.sampling import sampled

pytestmark = pytest.mark.usefixtures("no_log_records")


def recipe_for(folder: Path, count: int, **options: Any) -> TrainingRecipe:
    random = Random(0)
    path = folder / "lengths.txt"
    path.write_text("\n".join(str(random.randint(16, 300)) for _ in range(count)), encoding="utf-8")
    return TrainingRecipe(model="tiny", lengths=str(path), **{"batch": 2, "seq": 256, **options})


def silent(_text: str) -> None:
    pass


def elsewhere(task: Callable[..., Any], recipe: TrainingRecipe, progress: Progress = silent) -> Any:
    """What a function of this module returns in a process whose `cuda` is the simulated GPU."""
    return worker().run(f"{__name__}:{task.__name__}", recipe, progress)


def simulate_each_step(recipe: TrainingRecipe, _progress: Progress) -> tuple[int, int]:
    """The most allocated and reserved bytes of the run, each step run with the model's code."""
    with step_tracer(recipe) as tracer:
        for step in run_shapes(recipe).steps:
            for shape in step:
                tracer.micro_batch(shape)
            tracer.update()
        return tracer.allocator.highest_allocated_bytes, tracer.allocator.highest_reserved_bytes


@sampled(
    "options",
    [
        {},
        {"packing": True, "batch": 1, "alloc_conf": "expandable_segments:True"},
        {"grad_accum": 2, "liger": "all"},
        {"grad_accum": 5, "batch": 1, "clip": 1.0, "pad_to_multiple_of": 32},
        {"grad_accum": 3, "lora": 8, "precision": "bf16", "alloc_conf": "expandable_segments:True"},
    ],
    ids=["padded", "packed", "accumulated", "accumulated-5", "accumulated-lora"],
    every=2,
)
def test_a_run_is_what_its_steps_are(options: dict[str, Any], tmp_path: Path) -> None:
    recipe = recipe_for(tmp_path, 16, **options)
    run = simulate_run(recipe, silent)
    assert run.bounded_bytes == 0
    assert (run.peak_bytes, run.reserved_bytes) == elsewhere(simulate_each_step, recipe)
    assert run.oom is None
    assert run.fragmentation_bytes == run.reserved_bytes - run.peak_bytes


def held_after_micro_batches(recipe: TrainingRecipe, _progress: Progress) -> list[int]:
    held = []
    with step_tracer(recipe) as tracer:
        for tokens in (100, 200, 50):
            tracer.micro_batch(BatchShape(rows=2, tokens=tokens))
            held.append(tracer.allocator.allocated_bytes)
    return held


def test_a_micro_batch_leaves_gradients_and_its_loss(tmp_path: Path) -> None:
    recipe = recipe_for(tmp_path, 2, lora=8, precision="bf16", checkpointing=True, grad_accum=3)
    held = elsewhere(held_after_micro_batches, recipe)
    assert held == [held[0]] * 3


def run_that_follows(recipe: TrainingRecipe, progress: Progress) -> tuple[WholeRun, list[int]]:
    """A run, and how many micro-batches of its first step followed from later ones."""
    found: list[int] = []
    others = simulate._others_of_first_step

    def counted(*arguments: Any) -> Any:
        parts = others(*arguments)
        found.append(len(parts or ()))
        return parts

    with mock.patch.object(simulate, "_others_of_first_step", counted):
        return simulate.run_here(recipe, progress), found


def run_that_does_not_follow(recipe: TrainingRecipe, progress: Progress) -> WholeRun:
    """A run, each micro-batch of whose first step is traced."""
    with mock.patch.object(simulate, "_others_of_first_step", return_value=None):
        return simulate.run_here(recipe, progress)


@pytest.mark.slow
def test_the_first_step_follows_from_later_ones(tmp_path: Path) -> None:
    recipe = recipe_for(tmp_path, 15, grad_accum=5, lora=8, batch=1)
    run, followed = elsewhere(run_that_follows, recipe)
    assert followed == [3]
    assert elsewhere(run_that_does_not_follow, recipe) == run


def run_without_a_compiler(recipe: TrainingRecipe, progress: Progress) -> WholeRun:
    with (
        mock.patch.object(replay, "make_allocator", AllocatorState),
        mock.patch.object(replay, "can_compile", return_value=False),
    ):
        return simulate.run_here(recipe, progress)


def test_a_run_without_a_compiler_is_the_same(tmp_path: Path) -> None:
    recipe = recipe_for(tmp_path, 120, pad_to_multiple_of=64, grad_accum=3, memory_limit_bytes=150 * MIB)
    said: list[str] = []
    assert elsewhere(run_without_a_compiler, recipe, said.append) == simulate_run(recipe, silent)
    assert any("no C compiler" in text for text in said)


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainingRecipe, WholeRun]:
    recipe = recipe_for(tmp_path_factory.mktemp("lengths"), 400, pad_to_multiple_of=64)
    return recipe, simulate_run(recipe, silent)


def test_moments_name_their_step_and_shape(long_run: tuple[TrainingRecipe, WholeRun]) -> None:
    recipe, run = long_run
    steps = run_shapes(recipe).steps
    assert run.steps == len(steps) == 200
    assert steps[run.peak.step - 1] == (run.peak.shape,)
    assert run.to_json()["peak"] == {
        "step": run.peak.step,
        "rows": 2,
        "tokens": run.peak.shape.tokens,
        "masked": run.peak.shape.masked,
    }


def test_memory_that_runs_out_names_the_step(long_run: tuple[TrainingRecipe, WholeRun]) -> None:
    recipe, run = long_run
    limited = dataclasses.replace(recipe, memory_limit_bytes=run.peak_bytes - MIB)
    failed = simulate_run(limited, silent)
    assert failed.oom is not None
    assert failed.oom.moment.step == failed.steps + 1
    assert failed.oom.reserved_bytes <= failed.oom.limit_bytes < run.peak_bytes


def test_other_engines_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="a whole run under ddp cannot be simulated"):
        simulate_run(recipe_for(tmp_path, 4, engine="ddp", gpus=2), silent)


def test_a_judge_names_the_step_of_the_run_or_the_evaluation(tmp_path: Path) -> None:
    recipe = recipe_for(tmp_path, 12, batch=1, pad_to_multiple_of=128)
    said: list[str] = []
    judge = make_judge(recipe, simulate=True, progress=said.append)
    run = judge.verdict(recipe)
    assert run.decided_by is Moment.STEADY
    assert run.run_step is not None
    assert 1 <= run.run_step <= 12
    evaluated = judge.verdict(dataclasses.replace(recipe, eval_batch=32))
    assert evaluated.fits
    assert (evaluated.decided_by, evaluated.run_step) == (Moment.EVALUATION, None)
    said.clear()
    limited = dataclasses.replace(recipe, eval_batch=32, memory_limit_bytes=run.held_bytes)
    failed = make_judge(limited, simulate=True, progress=said.append).verdict(limited)
    assert (failed.fits, failed.decided_by, failed.run_step) == (False, Moment.EVALUATION, None)
    # the run takes longer, and does not matter
    assert not any("tracing" in text for text in said)
