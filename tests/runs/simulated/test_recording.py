"""The events of a simulated step against the recording of a real one, in their order."""

import difflib
from typing import Any

import pytest

from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.simulated import simulate_step
from ligerprof.snapshots.reader import read_snapshot
from tests.paths import RECORDINGS

# Of thousands of events, those that differ by the versions (recorded: torch 2.11, transformers 5.17): rotary embeddings
# multiply in 5.23 where they took a matrix product, and the recorded script cast two buffers that we leave in fp32.
MOST_DIFFERENT_EVENTS = 40


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
    different = sum(
        (stop - start) + (other_stop - other_start)
        for tag, start, stop, other_start, other_stop in matcher.get_opcodes()
        if tag != "equal"
    )
    assert len(recorded) > 8000
    assert different <= MOST_DIFFERENT_EVENTS


def _sizes(trace: Any) -> list[tuple[str, int]]:
    return [(event["action"], event["size"]) for event in trace if event["action"] in ("alloc", "free_completed")]
