"""What ZeRO-3 gathers, against every ZeRO step measured on H200s that is in the repository."""

import json
from typing import Any

import pytest

from ligerprof.analyzers.estimate import estimate
from ligerprof.analyzers.estimate.gathered import GatheringHooks
from ligerprof.analyzers.estimate.micro_batch import MicroBatch
from ligerprof.analyzers.estimate.static import make_weights
from ligerprof.analyzers.estimate.step import new_meter, run_step
from ligerprof.kernels.registry import find_kernel_set
from ligerprof.recipe.categories import Offload, Step
from ligerprof.recipe.configs.resolve import load_recipe
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Role
from ligerprof.units import MIB
from tests.paths import DATA, RESULTS
from tests.sampling import sampled

TOLERANCE = 0.01
FIRST_STEP_TOLERANCE = 0.002
# everything offloaded and fused kernels on two GPUs; the cause is not known
TOO_HIGH = 0.025


def steps_under_zero() -> list[dict[str, Any]]:
    lines = [
        line for name in ("study-h200", "zero-h200") for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()
    ]
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if row["recipe"]["engine"] == "deepspeed" and row["oom"] is None and row["peak_bytes"]]


def name_of(row: dict[str, Any]) -> str:
    recipe = row["recipe"]
    keys = ("zero", "offload", "gpus", "provider", "liger", "loss", "batch", "seq")
    return "-".join(str(recipe[key]) for key in keys)


@sampled("row", steps_under_zero(), ids=name_of, every=4)
def test_the_peak_is_as_measured(row: dict[str, Any]) -> None:
    recipe = TrainingRecipe.from_json(row["recipe"])
    estimated = estimate(recipe)
    is_too_high = recipe.gpus == 2 and recipe.offload is Offload.ALL and bool(recipe.kernels)
    peak, first = (TOO_HIGH, TOO_HIGH) if is_too_high else (TOLERANCE, FIRST_STEP_TOLERANCE)
    assert estimated.peak_bytes == pytest.approx(row["peak_bytes"], rel=peak)
    assert estimated.first_step_peak_bytes == pytest.approx(row["first_step_peak_bytes"], rel=first)


# of accelerate's stage 3 with offload on two GPUs; the other two files are within 0.02 %
SEVERAL_TOLERANCE = 0.013


def steps_of_files_under_zero() -> list[dict[str, Any]]:
    lines = (RESULTS / "framework-configs.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if "zero" in row["path"] or "ds_config" in row["path"]]


@pytest.mark.parametrize("row", steps_of_files_under_zero(), ids=lambda row: row["path"].rpartition("/")[2])
def test_the_peak_under_a_trainer_is_as_measured(row: dict[str, Any]) -> None:
    """Under the Trainer on one GPU, nothing is gathered, or weights come from main memory and are not reused."""
    gpus = row.get("gpus", 1)
    file = str(DATA / "configs" / "files" / row["path"])
    estimated = estimate(load_recipe([file], {"attention": "sdpa", "gpus": gpus, **row["options"]})[0])
    first, *later = row["allocated"]
    assert estimated.peak_bytes == pytest.approx(
        max(later), rel=FIRST_STEP_TOLERANCE if gpus == 1 else SEVERAL_TOLERANCE
    )
    assert estimated.first_step_peak_bytes == pytest.approx(first, rel=FIRST_STEP_TOLERANCE)


def with_fused_loss() -> list[dict[str, Any]]:
    return [row for row in steps_under_zero() if row["recipe"]["liger"] == "all" and row["recipe"]["batch"] > 8]


@pytest.mark.parametrize("row", with_fused_loss(), ids=name_of)
def test_what_is_gathered_at_the_peak_is_as_measured(row: dict[str, Any]) -> None:
    """A head that is called has given its weight back, for the embedding's; one that the model reads itself stays."""
    estimated = estimate(TrainingRecipe.from_json(row["recipe"])).roles[Role.COMMUNICATION]
    assert estimated == pytest.approx(row["roles"][Role.COMMUNICATION], abs=MIB)


@pytest.mark.parametrize("most", [1_000_000, 20_000_000, 1_000_000_000])
def test_each_gradient_is_reduced_once_and_leaves(most: int) -> None:
    """Whatever the bucket takes, no whole gradient is left for the optimizer's step."""
    config = {"zero_optimization": {"reduce_bucket_size": most}}
    options: dict[str, Any] = {"engine": "deepspeed", "zero": 3, "gpus": 4, "precision": "mixed", "batch": 1, "seq": 64}
    recipe = TrainingRecipe(model="tiny", deepspeed_config=config, **options)
    weights = make_weights(recipe)
    meter = new_meter(recipe)
    hooks = GatheringHooks(recipe, weights, meter, None)
    micro_batch = MicroBatch(recipe, weights, find_kernel_set(recipe.providers, recipe.spec), meter, hooks)
    micro_batch.forward()
    micro_batch.backward()
    hooks.end_step()
    held = {key: size for roles in meter.held_places.values() for key, size in roles.items() if size}
    assert all(weight.gradient is None for weight in weights.values())
    assert not held


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_steady_step_is_alike_whether_or_not_the_first_one_has_recorded_its_modules(accumulation: int) -> None:
    recipe = TrainingRecipe(
        model="tiny", engine="deepspeed", zero=3, gpus=2, precision="mixed", grad_accum=accumulation
    )
    kernels = find_kernel_set(recipe.providers, recipe.spec)
    first = run_step(recipe, kernels, Step.FIRST).recording
    assert first.modules
    alone, after = (run_step(recipe, kernels, Step.STEADY, before).recording for before in ((), (first,)))
    assert (after.sizes, after.events) == (alone.sizes, alone.events)
