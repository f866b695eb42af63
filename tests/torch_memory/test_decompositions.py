"""Decompositions against the blocks that an H200 allocated for them."""

import json
from pathlib import Path
from typing import Any

import pytest

from ligerprof.models import spec_from_config
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.simulated import simulate_step
from ligerprof.torch_memory.libraries import svd_scratch, svd_workspace_bytes

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ROWS = [json.loads(line) for line in (RESULTS / "galore-svd-h200.jsonl").read_text(encoding="utf-8").splitlines()[1:]]


def scratch_of(row: dict[str, Any]) -> tuple[int, ...]:
    """The measured blocks, without the three results."""
    sizes = [size if action == "alloc" else -size for action, size in row["events"]]
    return tuple(sizes[3:])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['rows']}x{row['columns']}")
def test_a_decomposition_allocates_what_was_measured(row: dict[str, Any]) -> None:
    shape = (row["rows"], row["columns"])
    if min(shape) >= 512:
        assert svd_scratch(*shape) == scratch_of(row)
    else:
        assert svd_workspace_bytes(*shape) is None


def test_a_first_step_of_galore_is_simulated_as_it_was_measured() -> None:
    rows = [json.loads(line) for line in (RESULTS / "low-bit-h200.jsonl").read_text(encoding="utf-8").splitlines()]
    measured = next(
        row
        for row in rows
        if row.get("options", {}).get("optimizer") == "galore" and row["options"]["precision"] == "bf16"
    )
    options = {**measured["options"], "model": spec_from_config(measured["options"]["model"], name="small")}
    simulated = simulate_step(TrainingRecipe(**options), record=False)
    assert simulated.first_step_peak_bytes == measured["first_step_peak_bytes"]


def test_nearly_square_matrices_follow_no_known_rule() -> None:
    assert svd_workspace_bytes(1280, 1024) is None
    assert svd_workspace_bytes(1536, 1024) is not None
