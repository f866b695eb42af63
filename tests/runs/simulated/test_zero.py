"""DeepSpeed's own code on fake tensors."""

import json
import os
import sys
from typing import Any

import pytest

from ligerprof.analyzers.estimate import estimate
from ligerprof.errors import UnsupportedError
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Role
from ligerprof.runs.simulated import simulate_step
from tests.paths import RESULTS
from tests.runs.simulated.test_ranks import roles_of

# docs/simulation.md quotes these
PEAK_TOLERANCE, RESERVED_TOLERANCE = 0.0001, 0.001
# ZeRO-3 with fused kernels; the cause of the difference is not known
# of a rank below the highest, with ZeRO-2 and fused kernels on four GPUs; not explained
OTHER_RANK_TOLERANCE = 0.001
FUSED_PEAK_TOLERANCE, FUSED_RESERVED_TOLERANCE = 0.004, 0.065
# docs/estimator-deepspeed.md quotes it
FP32_TOLERANCE = 0.02
ROWS = [
    row
    for row in map(json.loads, (RESULTS / "zero-h200.jsonl").read_text(encoding="utf-8").splitlines())
    if row["recipe"]["offload"] == "none"
]


def tiny(**options: Any) -> TrainingRecipe:
    given = {"model": "tiny", "batch": 2, "seq": 64, "engine": "deepspeed", "precision": "mixed", "gpus": 2, "zero": 2}
    return TrainingRecipe(**{**given, **options})


def name_of(row: dict[str, Any]) -> str:
    recipe = row["recipe"]
    return f"{recipe['model']}-{recipe['gpus']}gpus-zero{recipe['zero']}-{recipe['liger']}"


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_a_simulated_rank_takes_what_was_measured(row: dict[str, Any]) -> None:
    pytest.importorskip("deepspeed")
    recipe = TrainingRecipe.from_json(row["recipe"])
    found = simulate_step(recipe, record=False)
    differs = recipe.zero == 3 and bool(recipe.kernels)
    peak_tolerance = FUSED_PEAK_TOLERANCE if differs else PEAK_TOLERANCE
    reserved_tolerance = FUSED_RESERVED_TOLERANCE if differs else RESERVED_TOLERANCE
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
def test_roles_of_a_rank_add_up_and_nothing_is_left_behind(options: dict[str, Any]) -> None:
    pytest.importorskip("deepspeed")
    from torch import distributed
    from torch.nn import functional

    linear, hook, environment = functional.linear, sys.excepthook, dict(os.environ)
    recipe = tiny(**options)
    outcome = simulate_step(recipe)
    roles = roles_of(recipe, outcome)
    # DeepSpeed's bucket of 5e8 elements
    assert roles[Role.COMMUNICATION] >= 2 * 500_000_000
    assert roles[Role.OPTIMIZER_STATES] > 0
    assert sorted(outcome.ranks) == ([0, recipe.gpus - 1] if recipe.zero < 3 and recipe.gpus > 1 else [0])
    assert (functional.linear, sys.excepthook, dict(os.environ)) == (linear, hook, environment)
    assert not distributed.is_initialized()


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
    ("options", "says"),
    [({"zero": 0}, "--zero 0 with --engine deepspeed"), ({"zero": 2, "offload": "optimizer"}, "--offload optimizer")],
)
def test_what_is_not_covered_is_said(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedError, match=f"the simulator does not cover {says}"):
        simulate_step(tiny(**options))
