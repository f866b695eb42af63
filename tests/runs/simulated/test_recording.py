"""The events of a simulated step against the recording of a real one, in their order."""

import difflib
from typing import Any

import pytest

from ligerprof.analyzers.explain.analysis import explain
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Phase, Role
from ligerprof.runs.outcome import StepOutcome, package_versions
from ligerprof.runs.simulated import simulate_step
from ligerprof.snapshots.reader import Snapshot, read_snapshot
from ligerprof.units import MIB
from tests.paths import RECORDINGS

# Of thousands of events, those that differ by the versions (recorded: torch 2.11, transformers 5.17): rotary embeddings
# multiply in 5.23 where they took a matrix product, and the recorded script cast two buffers that we leave in fp32.
MOST_DIFFERENT_EVENTS = 40

# bytes of activations whose keeper is known; the rest are variables of a function that runs at the peak
KEPT_SHARE = 0.98


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("hf-ckpt-4x1024", {"batch": 4}),
        pytest.param(
            "hf-nockpt-8x1024",
            {"batch": 8, "checkpointing": False, "optimizer": "adamw-foreach"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_allocations_and_frees_come_in_the_order_of_the_recording(name: str, options: dict[str, Any]) -> None:
    outcome = simulate_step(TrainingRecipe(model="llama3.2-1b", precision="bf16", **options))
    simulated = _sizes(outcome.snapshot["device_traces"][0])
    recorded = _sizes(read_snapshot(RECORDINGS / f"{name}.pickle.xz").trace_of(0))

    matcher = difflib.SequenceMatcher(None, recorded, simulated, autojunk=False)
    different = [
        (start, recorded[start:stop], simulated[other_start:other_stop])
        for tag, start, stop, other_start, other_stop in matcher.get_opcodes()
        if tag != "equal"
    ]
    assert len(recorded) > 8000
    # the message has the events: which ones differ tells a cause
    count = sum(len(ours) + len(theirs) for _, theirs, ours in different)
    assert count <= MOST_DIFFERENT_EVENTS, f"{package_versions()}: {different}"


@pytest.fixture(scope="module")
def plain() -> StepOutcome:
    return simulate_step(TrainingRecipe(model="tiny", checkpointing=False))


def test_notes_on_saved_tensors_change_no_allocation(plain: StepOutcome) -> None:
    without = simulate_step(TrainingRecipe(model="tiny", checkpointing=False), record=False)

    assert (plain.peak_bytes, plain.reserved_bytes, plain.phases) == (
        without.peak_bytes,
        without.reserved_bytes,
        without.phases,
    )
    assert len(Snapshot.from_dict(plain.snapshot).saved_tensors) > 100
    assert not without.snapshot


def test_activations_have_operation_node_and_module(plain: StepOutcome) -> None:
    rows = explain(Snapshot.from_dict(plain.snapshot)).rows
    activations = [row for row in rows if row.role is Role.ACTIVATIONS and row.phase is Phase.FORWARD]
    known = [row for row in activations if row.operation and row.kept_by]
    assert sum(row.size_bytes for row in known) >= KEPT_SHARE * sum(row.size_bytes for row in activations)

    kept = {(row.module, row.operation, row.kept_by, row.kept_in): row for row in activations}
    layer = "model.layers.*"
    for module, operation, node, place in (
        ("mlp.gate_proj", "mm", "SiluBackward0", "mlp.act_fn"),
        ("mlp.act_fn", "silu", "MulBackward0", "mlp"),
        ("mlp.up_proj", "mm", "MulBackward0", "mlp"),
        ("mlp", "mul", "MmBackward0", "mlp.down_proj"),
    ):
        row = kept[f"{layer}.{module}", operation, node, f"{layer}.{place}"]
        assert (row.layers, row.count) == ((0, 1), 2)


def test_keepers_are_known_where_memory_runs_out_before_any_backward() -> None:
    recipe = TrainingRecipe(model="tiny", checkpointing=False, memory_limit_bytes=130 * MIB)
    outcome = simulate_step(recipe)
    assert outcome.oom is not None
    assert (outcome.oom.step, outcome.oom.phase) == (1, Phase.FORWARD)

    rows = explain(Snapshot.from_dict(outcome.snapshot)).rows
    kept = {(row.module, row.kept_by) for row in rows}
    assert ("model.layers.*.mlp.act_fn", "MulBackward0") in kept


def test_checkpoint_keeps_what_its_layers_were_called_with() -> None:
    outcome = simulate_step(TrainingRecipe(model="tiny"))
    rows = explain(Snapshot.from_dict(outcome.snapshot)).rows
    kept_by = {row.module: row.kept_by for row in rows if row.phase is Phase.FORWARD and row.size_bytes > 0}
    # the rotary tables are arguments of every layer; recomputation saves them only later
    assert (kept_by["model.embed_tokens"], kept_by["model.rotary_emb"]) == ("checkpoint", "checkpoint")
    assert kept_by["lm_head"] == "MmBackward0"


def _sizes(trace: Any) -> list[tuple[str, int]]:
    return [(event["action"], event["size"]) for event in trace if event["action"] in ("alloc", "free_completed")]
