"""Simulated ranks of FSDP2 and DDP, against two H200 (torch 2.11; tests/data/truth/h200x2-ranks.jsonl)."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from ligerprof.analyzers.estimate.analytic import estimate
from ligerprof.analyzers.explain.analysis import analyze
from ligerprof.errors import RecipeError
from ligerprof.models import spec_from_config
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Role
from ligerprof.runs.outcome import StepOutcome
from ligerprof.runs.simulated import simulate_step
from ligerprof.snapshots.reader import Snapshot
from tests.kernels.models import FAMILIES
from tests.paths import RESULTS
from tests.rank_truth import ROWS, name_of, recipe_of

# docs/simulation.md quotes these
PEAK_TOLERANCE = 0.0005
RESERVED_TOLERANCE = 0.01
# cuBLAS's workspace was there before the first step of rows that followed others in their process
USED_PROCESS_FIRST_STEP_TOLERANCE = 0.01
STEPS = 3
GEMMA = spec_from_config({"model_type": "gemma2", **FAMILIES["gemma2"]}, name="gemma2")

pytestmark = pytest.mark.usefixtures("no_log_records")

# the rest is marked slow
QUICK = ("fsdp2-llama3.2-1b-ckpt-accumulation1-reducefp32", "ddp-llama3.2-1b-ckpt-accumulation1-reducefp32")


def cases() -> Iterator[object]:
    for row in ROWS:
        yield pytest.param(row, id=name_of(row), marks=[] if name_of(row) in QUICK else [pytest.mark.slow])


@pytest.mark.parametrize("row", list(cases()))
def test_a_simulated_rank_takes_what_the_gpu_took(row: Mapping[str, Any]) -> None:
    found = simulate_step(recipe_of(row), record=False)
    is_ddp = row["mode"] == "ddp"
    pairs = [(found.peak_bytes, row["peaks"][STEPS - 1 if is_ddp else 1])]
    if is_ddp:
        pairs.append((found.second_step_peak_bytes or 0, row["peaks"][1]))
    for simulated_bytes, measured_bytes in pairs:
        assert abs(simulated_bytes / measured_bytes - 1) <= PEAK_TOLERANCE
    assert abs(found.first_step_peak_bytes / row["peaks"][0] - 1) <= USED_PROCESS_FIRST_STEP_TOLERANCE
    assert abs(found.reserved_bytes / row["reserved"][STEPS - 1] - 1) <= RESERVED_TOLERANCE


def measured_rows() -> list[Any]:
    """The rows of benchmarks/ranks.py."""
    lines = (RESULTS / "ranks-h200x2.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == "row"]


@pytest.mark.slow
@pytest.mark.parametrize("row", measured_rows(), ids=lambda row: f"{row['recipe']['engine']}-{row['recipe']['model']}")
def test_a_simulated_rank_takes_what_its_benchmark_took(row: Mapping[str, Any]) -> None:
    recipe = TrainingRecipe.from_json(row["recipe"])
    try:
        found = simulate_step(recipe, record=False)
    except RecipeError as error:
        pytest.skip(str(error))
    for rank, outcome in found.ranks.items():
        measured = row["ranks"][rank]
        steady = STEPS - 1 if recipe.engine == "ddp" else 1
        assert abs(outcome.peak_bytes / measured["peaks"][steady] - 1) <= PEAK_TOLERANCE
        assert abs(outcome.first_step_peak_bytes / measured["peaks"][0] - 1) <= PEAK_TOLERANCE
        assert abs(outcome.reserved_bytes / measured["reserved"][steady] - 1) <= RESERVED_TOLERANCE


def tiny(**options: Any) -> TrainingRecipe:
    return TrainingRecipe(**{"model": "tiny", "batch": 2, "seq": 64, "engine": "fsdp2", "gpus": 2, **options})


def roles_of(recipe: TrainingRecipe, outcome: StepOutcome) -> Mapping[Role, int]:
    analysis = analyze(Snapshot.from_dict(outcome.snapshot), step=outcome.profiled_step, recipe=recipe)
    assert analysis.peak.peak_bytes == outcome.peak_bytes
    assert sum(analysis.peak.roles.roles.values()) == outcome.peak_bytes
    assert analysis.peak.roles.roles[Role.UNATTRIBUTED] == 0
    return analysis.peak.roles.roles


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "mixed", "gpus": 3},
        {"precision": "amp", "reshard": False, "clip": 1.0, "gpus": 4, "replicate": 2},
        {"precision": "mixed", "wrap": "accelerate", "grad_accum": 2, "grad_sync": "every"},
        {"engine": "ddp", "grad_accum": 2, "clip": 1.0},
        # its embedding makes a scalar on the meta device
        {"model": GEMMA, "precision": "mixed", "attention": "eager"},
    ],
    ids=["uneven", "hsdp", "accelerate", "ddp", "gemma2"],
)
def test_roles_of_a_rank_add_up(options: dict[str, Any]) -> None:
    recipe = tiny(**options)
    outcome = simulate_step(recipe)
    roles = roles_of(recipe, outcome)
    assert roles[Role.COMMUNICATION] > 0
    # gathered weights are communication: what is left are the rank's own shards in fp32
    own_elements = recipe.spec.parameter_count / recipe.shards
    assert roles[Role.PARAMETERS] == pytest.approx(4 * own_elements, rel=0.02)
    assert roles[Role.OPTIMIZER_STATES] == pytest.approx(8 * own_elements, rel=0.02)


def test_the_worst_of_uneven_ranks_is_named() -> None:
    outcome = simulate_step(tiny(gpus=3, precision="mixed"), record=False)
    assert sorted(outcome.ranks) == [0, 2]
    assert outcome.peak_bytes == outcome.ranks[0].peak_bytes > outcome.ranks[2].peak_bytes
    assert any("Ranks 0 and 2 of 3 were simulated" in note and "rank 0's" in note for note in outcome.notes)


def test_streams_keep_their_blocks_apart() -> None:
    outcome = simulate_step(tiny(gpus=4, precision="mixed"))
    events = outcome.snapshot["device_traces"][0]
    assert len({event["stream"] for event in events if event["action"] == "alloc"}) == 3
    segments = {segment["address"]: segment for segment in outcome.snapshot["segments"]}
    for event in (event for event in events if event["action"] == "alloc"):
        holder = next(item for at, item in segments.items() if at <= event["addr"] < at + item["total_size"])
        assert holder["stream"] == event["stream"]


def test_ddp_holds_its_first_bucket_next_to_the_new_ones_in_the_second_step() -> None:
    recipe = tiny(engine="ddp")
    outcome = simulate_step(recipe, record=False)
    bucket_bytes = 4 * recipe.spec.parameter_count
    assert outcome.second_step_peak_bytes is not None
    assert outcome.second_step_peak_bytes - outcome.peak_bytes == pytest.approx(bucket_bytes, rel=0.05)


def test_offloaded_shards_are_in_main_memory() -> None:
    recipe = tiny(precision="mixed", offload="all", clip=1.0)
    outcome = simulate_step(recipe)
    roles = roles_of(recipe, outcome)
    # frequencies of rotary angles are buffers, which stay on the GPU
    assert roles[Role.PARAMETERS] < 100
    assert roles[Role.OPTIMIZER_STATES] == 0
    # shards, gradients and two moments of fp32
    shard_bytes = 16 * recipe.spec.parameter_count / 2
    # page-locked blocks are rounded up to powers of two
    assert shard_bytes <= outcome.host_bytes < 2 * shard_bytes
    assert outcome.host_bytes == pytest.approx(estimate(recipe).host_bytes, rel=0.01)


@pytest.mark.slow
def test_gradients_that_wait_for_the_last_micro_batch_are_not_sharded() -> None:
    """FSDP2 keeps them whole in the dtype of the reduction, and reduces them with the last micro-batch."""
    options = {"precision": "mixed", "grad_accum": 2, "gpus": 8, "liger": "flce"}
    last, every = (simulate_step(tiny(**options, grad_sync=sync), record=False) for sync in ("last", "every"))
    whole_bytes = 4 * tiny().spec.parameter_count
    assert last.peak_bytes - every.peak_bytes > whole_bytes / 2
