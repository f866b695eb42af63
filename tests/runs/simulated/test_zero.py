"""DeepSpeed's own code on a simulated GPU."""

import dataclasses
import json
from typing import Any

import pytest

from ligerprof.analyzers.estimate import estimate
from ligerprof.errors import UnsupportedError
from ligerprof.recipe.categories import Offload
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Phase, Role
from ligerprof.runs.simulated import simulate_step
from tests.paths import RESULTS
from tests.runs.simulated.test_ranks import roles_of

# docs/simulation.md quotes these
PEAK_TOLERANCE, RESERVED_TOLERANCE = 0.0001, 0.001
# of a rank below the highest, with ZeRO-2 and fused kernels on four GPUs; not explained
OTHER_RANK_TOLERANCE = 0.001
# ZeRO-3 with fused kernels; the cause of the difference is not known. Reserved bytes differ without ZeRO, too
FUSED_PEAK_TOLERANCE, FUSED_RESERVED_TOLERANCE = 0.006, 0.11
# with offload; the cause of the difference is not known
OFFLOADED_RESERVED_TOLERANCE = 0.13
# docs/estimator-deepspeed.md quotes it
FP32_TOLERANCE = 0.02
# docs/whole-run.md quotes it
EVALUATION_TOLERANCE = 0.02
ROWS = [json.loads(line) for line in (RESULTS / "zero-h200.jsonl").read_text(encoding="utf-8").splitlines()]


def tiny(**options: Any) -> TrainingRecipe:
    given = {"model": "tiny", "batch": 2, "seq": 64, "engine": "deepspeed", "precision": "mixed", "gpus": 2, "zero": 2}
    return TrainingRecipe(**{**given, **options})


def name_of(row: dict[str, Any]) -> str:
    recipe = row["recipe"]
    return "-".join(str(recipe[key]) for key in ("model", "gpus", "zero", "offload", "liger", "lora"))


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_a_simulated_rank_takes_what_was_measured(row: dict[str, Any]) -> None:
    pytest.importorskip("deepspeed")
    recipe = TrainingRecipe.from_json(row["recipe"])
    found = simulate_step(recipe, record=False)
    differs = recipe.zero == 3 and bool(recipe.kernels)
    peak_tolerance = FUSED_PEAK_TOLERANCE if differs else PEAK_TOLERANCE
    reserved_tolerance = FUSED_RESERVED_TOLERANCE if differs or recipe.zero == 0 else RESERVED_TOLERANCE
    if recipe.offload is not Offload.NONE:
        reserved_tolerance = OFFLOADED_RESERVED_TOLERANCE
    assert found.peak_bytes == pytest.approx(row["peak_bytes"], rel=peak_tolerance)
    assert found.first_step_peak_bytes == pytest.approx(row["first_step_peak_bytes"], rel=PEAK_TOLERANCE)
    assert found.reserved_bytes == pytest.approx(row["reserved_bytes"], rel=reserved_tolerance)
    rank_tolerance = max(peak_tolerance, OTHER_RANK_TOLERANCE)
    for rank, outcome in found.ranks.items():
        measured = next(item for item in row["ranks"] if item["rank"] == rank)
        assert outcome.peak_bytes == pytest.approx(measured["peak_bytes"], rel=rank_tolerance)


@pytest.mark.parametrize(
    "options",
    [
        {"zero": 1, "grad_accum": 2},
        {"zero": 2, "gpus": 4, "liger": "all"},
        {"zero": 3, "precision": "mixed-fp16"},
        {"zero": 3, "gpus": 1},
        {"zero": 3, "precision": "fp32"},
    ],
    ids=["1", "2", "3", "3-alone", "3-fp32"],
)
def test_roles_of_a_rank_add_up(options: dict[str, Any]) -> None:
    pytest.importorskip("deepspeed")
    recipe = tiny(**options)
    outcome = simulate_step(recipe)
    roles = roles_of(recipe, outcome)
    # DeepSpeed's bucket of 5e8 elements
    assert roles[Role.COMMUNICATION] >= 2 * 500_000_000
    assert roles[Role.OPTIMIZER_STATES] > 0
    assert sorted(outcome.ranks) == ([0, recipe.gpus - 1] if recipe.zero < 3 and recipe.gpus > 1 else [0])


@pytest.mark.parametrize("gpus", [1, 4])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_the_estimate_in_fp32(zero: int, gpus: int) -> None:
    """ZeRO keeps a copy of fp32 weights as well; its own code is what a GPU would run."""
    pytest.importorskip("deepspeed")
    recipe = tiny(zero=zero, gpus=gpus, precision="fp32", grad_accum=2)
    simulated, estimated = simulate_step(recipe, record=False), estimate(recipe)
    assert estimated.peak_bytes == pytest.approx(simulated.peak_bytes, rel=FP32_TOLERANCE)
    assert estimated.first_step_peak_bytes == pytest.approx(simulated.first_step_peak_bytes, rel=FP32_TOLERANCE)


@pytest.mark.parametrize(
    "options",
    [
        {"zero": 0},
        {"zero": 1},
        {"zero": 2, "offload": "optimizer"},
        {"zero": 3},
        {"zero": 3, "liger": "all", "gpus": 1},
        {"zero": 3, "checkpointing": False, "grad_accum": 2, "precision": "fp32"},
        {"zero": 3, "offload": "all", "lora": 8},
    ],
    ids=["0", "1", "2-optimizer", "3", "3-alone", "3-fp32", "3-all-lora"],
)
def test_an_evaluation_is_estimated(options: dict[str, Any]) -> None:
    pytest.importorskip("deepspeed")
    recipe = tiny(**options, eval_batch=16, alloc_conf="expandable_segments:True")
    outcome, estimated = simulate_step(recipe, record=False), estimate(recipe)
    evaluated = outcome.phases[Phase.EVALUATION]
    assert evaluated == pytest.approx(estimated.phases[Phase.EVALUATION], rel=EVALUATION_TOLERANCE)
    # an evaluation changes nothing about the steps before it
    alone = simulate_step(dataclasses.replace(recipe, eval_batch=None), record=False)
    assert (outcome.peak_bytes, outcome.first_step_peak_bytes) == (alone.peak_bytes, alone.first_step_peak_bytes)


@pytest.mark.parametrize(
    ("options", "on_gpu"),
    [
        ({"zero": 0}, {Role.PARAMETERS, Role.OPTIMIZER_STATES}),
        ({"zero": 1, "offload": "optimizer"}, {Role.PARAMETERS}),
        ({"zero": 2, "offload": "optimizer", "grad_accum": 2}, {Role.PARAMETERS}),
        ({"zero": 3, "offload": "optimizer"}, {Role.PARAMETERS}),
        ({"zero": 3, "offload": "all", "liger": "all"}, set()),
        ({"zero": 3, "offload": "all", "gpus": 1}, set()),
    ],
    ids=["0", "1-optimizer", "2-optimizer", "3-optimizer", "3-all", "3-all-alone"],
)
def test_what_is_offloaded_is_in_main_memory(options: dict[str, Any], on_gpu: set[Role]) -> None:
    pytest.importorskip("deepspeed")
    recipe = tiny(**options)
    outcome = simulate_step(recipe, record=False)
    estimated = estimate(recipe)
    assert outcome.peak_bytes == pytest.approx(estimated.peak_bytes, rel=0.01)
    assert outcome.first_step_peak_bytes == pytest.approx(estimated.first_step_peak_bytes, rel=0.01)
    assert {role for role in (Role.PARAMETERS, Role.OPTIMIZER_STATES) if estimated.roles[role]} == on_gpu
    if recipe.offload is Offload.NONE:
        assert outcome.host_bytes is None
    else:
        assert outcome.host_bytes == pytest.approx(estimated.host_bytes, rel=0.1)


def test_what_is_not_covered_is_said() -> None:
    with pytest.raises(UnsupportedError, match="the simulator does not cover --offload nvme"):
        simulate_step(tiny(zero=3, offload="nvme", nvme_path="/tmp"))
