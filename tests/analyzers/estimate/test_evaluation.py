"""The evaluation of an estimate, and what it does to the verdict."""

import dataclasses
import json
from typing import Any

import pytest

from ligerprof.analyzers.estimate import Moment, estimate
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import STEP_PHASES, Phase, Role
from ligerprof.units import GIB
from tests.paths import RESULTS

STEP = TrainingRecipe(model="llama3.2-1b", batch=1, seq=1024, optimizer="sgd", precision="bf16")


def test_an_evaluation_does_not_change_the_step() -> None:
    plain, evaluated = estimate(STEP), estimate(dataclasses.replace(STEP, eval_batch=8))
    assert plain.evaluation_peak_bytes is None
    assert set(plain.phases) == set(STEP_PHASES)
    assert evaluated.phases[Phase.EVALUATION] == evaluated.evaluation_peak_bytes
    assert (plain.peak_bytes, plain.roles) == (evaluated.peak_bytes, evaluated.roles)
    assert evaluated.highest == (Moment.EVALUATION, evaluated.evaluation_peak_bytes)


def test_the_roles_of_an_evaluation_add_up_and_hold_no_gradients() -> None:
    roles = estimate(dataclasses.replace(STEP, eval_batch=8)).evaluation_roles
    assert roles is not None
    assert roles[Role.GRADIENTS] == roles[Role.CHECKPOINTS] == 0
    # logits and their fp32 copy, then log-probabilities, with the loss and its divisor
    plane = 8 * 1024 * STEP.spec.vocab_size
    assert (roles[Role.LOGITS], roles[Role.CE_TEMPORARIES]) == (6 * plane, 4 * plane + 8)


def test_an_evaluation_above_the_step_decides() -> None:
    limited = dataclasses.replace(STEP, memory_limit_bytes=12 * GIB)
    verdict = estimate(limited).gpu
    assert verdict is not None
    assert verdict.answer.fits
    larger = estimate(dataclasses.replace(limited, eval_batch=8)).gpu
    assert larger is not None
    assert not larger.allocated_fits
    assert larger.decided_by is Moment.EVALUATION


# docs/whole-run.md quotes these; under ZeRO-3 weights stay gathered for a backward pass that does not come
MEASURED_TOLERANCE, ZERO_3_TOLERANCE, ADAPTER_TOLERANCE = 4e-4, 0.016, 0.01


def measured(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / f"{name}-h200x2.jsonl").read_text(encoding="utf-8").splitlines()]


def test_measured_evaluations() -> None:
    for row in measured("evaluated"):
        recipe = TrainingRecipe.from_json(row["recipe"])
        tolerance = ZERO_3_TOLERANCE if recipe.zero == 3 else MEASURED_TOLERANCE
        assert estimate(recipe).evaluation_peak_bytes == pytest.approx(row["phases"]["evaluation"], rel=tolerance)


def test_measured_saving() -> None:
    for row in measured("saving"):
        recipe = TrainingRecipe.from_json(row["recipe"])
        # the third peak; rows share processes
        size_bytes = max(rank["peaks"][2] - rank["base_bytes"] for rank in row["ranks"])
        tolerance = ADAPTER_TOLERANCE if recipe.lora else MEASURED_TOLERANCE
        assert estimate(recipe).saving_peak_bytes == pytest.approx(size_bytes, rel=tolerance)


def test_a_fused_loss_evaluates_without_logits() -> None:
    fused = estimate(dataclasses.replace(STEP, eval_batch=8, liger="flce"))
    assert fused.evaluation_roles is not None
    assert fused.evaluation_roles[Role.LOGITS] == 0


@pytest.mark.parametrize(
    "engine",
    [
        {"engine": "ddp"},
        {"engine": "fsdp2", "precision": "mixed"},
        {"engine": "deepspeed", "precision": "mixed", "zero": 3},
    ],
    ids=lambda options: options["engine"],
)
def test_an_evaluation_holds_what_the_engine_adds(engine: dict[str, Any]) -> None:
    """DDP's buckets, which are as large as the gradients; the weights that FSDP2 and ZeRO-3 gather."""
    evaluated = estimate(dataclasses.replace(STEP, eval_batch=8, gpus=2, **engine))
    assert evaluated.evaluation_roles is not None
    assert evaluated.evaluation_roles[Role.COMMUNICATION] > 0
    # ZeRO-3 keeps the memory of its partitioned gradients
    kept = engine["engine"] == "deepspeed"
    assert (evaluated.evaluation_roles[Role.GRADIENTS] > 0) == kept
    assert evaluated.highest[0] is Moment.EVALUATION
