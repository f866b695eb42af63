"""Estimates against steps measured on one H200; docs/estimator.md quotes the tolerances."""

import functools
import json
from typing import Any

import pytest

from ligerprof.analyzers.estimate import estimate as compute_estimate
from ligerprof.models import spec_from_config
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Phase
from tests.paths import RESULTS, TRUTH
from tests.truth import MeasuredStep, wider_steps

# several tests judge the same estimates
estimate = functools.cache(compute_estimate)

ROWS = [json.loads(line) for line in (TRUTH / "h200-steps.jsonl").read_text(encoding="utf-8").splitlines()]

# |estimate / measured - 1| of the steady step's peak
PLAIN_TOLERANCE = 0.01
TRANSFORMERS_4_45_TOLERANCE = 0.001
LIGER_KERNEL_TOLERANCE = 0.003
# the same of each phase, and of the first step's peak, on plain transformers
PHASE_TOLERANCE = 0.01
FIRST_STEP_TOLERANCE = 0.01
MEDIAN_TOLERANCE = 0.0001


def recipe_of(row: dict[str, Any]) -> TrainingRecipe:
    model = str(TRUTH / "odd-llama" / "config.json") if row["model"] == "odd" else row["model"]
    return TrainingRecipe(
        model=model,
        provider=row["provider"] or "ligerprof",
        **{
            key: row[key]
            for key in ("liger", "precision", "checkpointing", "optimizer", "attention", "loss", "batch", "seq")
        },
    )


def name_of(row: dict[str, Any]) -> str:
    checkpointing = "checkpointed" if row["checkpointing"] else "whole"
    parts = [row["model"], row["precision"], row["attention"], checkpointing, row["optimizer"], row["loss"]]
    return "-".join([*parts, f"{row['batch']}x{row['seq']}", row["provider"] or "plain", row["liger"]])


def plain(row: dict[str, Any]) -> bool:
    return row["provider"] is None


def tolerance_of(row: dict[str, Any]) -> float:
    if row["loss"] == "hf-4.45":
        return TRANSFORMERS_4_45_TOLERANCE
    return PLAIN_TOLERANCE if plain(row) else LIGER_KERNEL_TOLERANCE


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_peak_is_within_its_tolerance(row: dict[str, Any]) -> None:
    assert estimate(recipe_of(row)).peak_bytes == pytest.approx(row["peak_bytes"], rel=tolerance_of(row))


@pytest.mark.parametrize("row", [row for row in ROWS if plain(row)], ids=name_of)
def test_phases_are_within_their_tolerance(row: dict[str, Any]) -> None:
    phases = estimate(recipe_of(row)).phases
    assert {phase.value for phase in phases} == set(row["phases"])
    for word, measured_bytes in row["phases"].items():
        assert phases[Phase(word)] == pytest.approx(measured_bytes, rel=PHASE_TOLERANCE), word


@pytest.mark.parametrize("row", [row for row in ROWS if plain(row)], ids=name_of)
def test_first_step_is_within_its_tolerance(row: dict[str, Any]) -> None:
    # what cuBLAS held before the row began, the row's own first step did not have to take
    held_before_bytes = row["library_workspace_at_start_bytes"]
    estimated_bytes = estimate(recipe_of(row)).first_step_peak_bytes
    low, high = estimated_bytes, estimated_bytes + held_before_bytes
    assert low * (1 - FIRST_STEP_TOLERANCE) <= row["first_step_peak_bytes"] <= high * (1 + FIRST_STEP_TOLERANCE)


def test_median_error_on_plain_transformers_is_tiny() -> None:
    errors = sorted(abs(estimate(recipe_of(row)).peak_bytes / row["peak_bytes"] - 1) for row in ROWS if plain(row))
    assert errors[len(errors) // 2] <= MEDIAN_TOLERANCE


# steps over the whole recipe space, measured after the closed form was written
WIDER_TOLERANCE = 0.005
WIDER_MEDIAN_TOLERANCE = 0.0001
FINISHED = [step for step in wider_steps() if step.peak_bytes is not None]


@pytest.mark.parametrize("step", FINISHED, ids=lambda step: step.name)
def test_peak_of_a_wider_step_is_within_its_tolerance(step: MeasuredStep) -> None:
    assert estimate(step.recipe()).peak_bytes == pytest.approx(step.peak_bytes, rel=WIDER_TOLERANCE)


def test_median_error_on_wider_steps_is_tiny() -> None:
    errors = sorted(abs(estimate(step.recipe()).peak_bytes / (step.peak_bytes or 0) - 1) for step in FINISHED)
    assert errors[len(errors) // 2] <= WIDER_MEDIAN_TOLERANCE


# steps drawn at random; benchmarks/accuracy.py measured them and benchmarks/results keeps them
DRAWN_WORST = 0.003
DRAWN_MEDIAN = 0.00002
DRAWN = [RESULTS / f"accuracy-{name}.jsonl" for name in ("h200", "2911-h200")]


def test_drawn_steps_are_within_their_tolerances() -> None:
    rows = [json.loads(line) for path in DRAWN for line in path.read_text(encoding="utf-8").splitlines()]
    # kernels of our own change, and with them what they take
    rows = [row for row in rows if "failed" not in row and row["options"].get("liger", "none") == "none"]
    errors = sorted(abs(estimate(drawn_recipe_of(row)).peak_bytes / row["peak_bytes"] - 1) for row in rows)
    assert errors[len(errors) // 2] <= DRAWN_MEDIAN
    assert errors[-1] <= DRAWN_WORST


def drawn_recipe_of(row: dict[str, Any]) -> TrainingRecipe:
    options = dict(row["options"])
    if isinstance(options["model"], dict):
        options["model"] = spec_from_config(options["model"], name="drawn")
    return TrainingRecipe(**options)


# DeepSpeed 0.19.8, one and two GPUs: the profiled step's peak
DEEPSPEED_TOLERANCE = 0.005
DEEPSPEED_ROWS = [
    json.loads(line) for line in (TRUTH / "h200-deepspeed.jsonl").read_text(encoding="utf-8").splitlines()
]


def deepspeed_recipe_of(row: dict[str, Any]) -> TrainingRecipe:
    return TrainingRecipe(
        engine="deepspeed",
        provider=row["provider"] or "ligerprof",
        precision="mixed-fp16" if row["half_dtype"] == "fp16" else "mixed",
        **{
            key: row[key]
            for key in ("model", "liger", "checkpointing", "reentrant", "zero", "offload", "gpus", "batch", "seq")
        },
    )


def deepspeed_name_of(row: dict[str, Any]) -> str:
    reentrant = "reentrant" if row["reentrant"] else "not-reentrant"
    return (
        f"zero{row['zero']}-{row['offload']}-{row['gpus']}gpus-{row['liger']}-{row['batch']}x{row['seq']}-{reentrant}"
    )


@pytest.mark.parametrize("row", DEEPSPEED_ROWS, ids=deepspeed_name_of)
def test_deepspeed_peak_is_within_its_tolerance(row: dict[str, Any]) -> None:
    estimated = estimate(deepspeed_recipe_of(row))
    if row.get("oom"):
        assert estimated.peak_bytes > row["memory_limit_gib"] * 2**30
        return
    profiled_bytes = estimated.first_step_peak_bytes if row["steps_run"] == 1 else estimated.peak_bytes
    assert profiled_bytes == pytest.approx(row["peak_bytes"], rel=DEEPSPEED_TOLERANCE)
