"""Configurations of TRL as files, estimated and simulated, against what TRL's own script allocated on an H200."""

import json
from typing import Any

import pytest

from ligerprof.analyzers.estimate import estimate
from ligerprof.recipe.configs.resolve import load_recipe
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.simulated import simulate_step
from tests.paths import DATA

UNCHANGED = DATA / "unchanged"
ROWS: list[dict[str, Any]] = json.loads((UNCHANGED / "h200.json").read_text())
TOLERANCE = 0.002
# unsplit remainders of blocks depend on what the cache held before
REENTRANT_TOLERANCE = 0.003

SLOW = frozenset({"sft-lora-1b"})

pytestmark = pytest.mark.usefixtures("no_log_records")


def read(name: str, monkeypatch: pytest.MonkeyPatch) -> TrainingRecipe:
    # the files name their models by relative paths
    monkeypatch.chdir(UNCHANGED)
    return load_recipe([f"{name}.yaml"], {"gpu": "h200"})[0]


def tolerance(recipe: TrainingRecipe) -> float:
    return REENTRANT_TOLERANCE if recipe.reentrant else TOLERANCE


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_an_unchanged_script_takes_what_its_file_is_estimated_at(
    row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = read(row["name"], monkeypatch)
    found = estimate(recipe)
    peak_bytes = max(found.peak_bytes, found.first_step_peak_bytes)
    assert peak_bytes == pytest.approx(row["peak_bytes"], rel=tolerance(recipe))


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=row["name"], marks=[pytest.mark.slow] if row["name"] in SLOW else []) for row in ROWS],
)
def test_an_unchanged_script_takes_what_its_file_simulates(
    row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = read(row["name"], monkeypatch)
    found = simulate_step(recipe, record=False)
    peak_bytes = max(found.peak_bytes, found.first_step_peak_bytes)
    assert peak_bytes == pytest.approx(row["peak_bytes"], rel=tolerance(recipe))
