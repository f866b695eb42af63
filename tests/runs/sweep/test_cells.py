import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ligerprof.analyzers.estimate import estimate
from ligerprof.errors import ResultFormatError
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.sweep.cells import CellStatus, cell_from_json, read_cells
from tests.paths import RESULTS

MEASURED = RESULTS / "steps-h200.jsonl"
RECIPE = TrainingRecipe(model="tiny", seq=64)
ESTIMATE = estimate(RECIPE).to_json()


def row(key: str = "a", **changes: Any) -> dict[str, Any]:
    values = {
        **{name: ESTIMATE[name] for name in ("schema", "peak_bytes", "phases", "roles")},
        "kind": "cell",
        "key": key,
        "status": "done",
        "error": None,
        "seconds": 1.5,
        "backend": "simulated",
        "gpu": "NVIDIA H200",
        "reserved_bytes": 2**27,
        "step_seconds": None,
        "tokens_per_second": None,
        "oom": None,
        "recipe": RECIPE.to_json(),
        "finished": "2026-01-02T03:04:05+00:00",
    }
    return {**values, **changes}


def write(path: Path, *rows: dict[str, Any], end: str = "") -> Path:
    path.write_text("".join(json.dumps(values) + "\n" for values in rows) + end)
    return path


def test_a_row_reads_back(tmp_path: Path) -> None:
    write(tmp_path / "results.jsonl", row())
    (cell,) = read_cells([tmp_path])
    assert (cell.key, cell.status) == ("a", CellStatus.DONE)
    assert cell.recipe.to_json() == RECIPE.to_json()
    assert cell.figures is not None
    assert (cell.figures.backend, cell.figures.peak_bytes) == ("simulated", ESTIMATE["peak_bytes"])
    assert cell.finished == datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)


def test_the_last_row_of_a_key_counts_across_files(tmp_path: Path) -> None:
    first = write(tmp_path / "1.jsonl", row("a", status="failed", error="died"), row("b"))
    second = write(tmp_path / "2.jsonl", row("a"))
    assert [(cell.key, cell.status.value) for cell in read_cells([first, second])] == [("b", "done"), ("a", "done")]
    assert {cell.key: cell.status.value for cell in read_cells([second, first])} == {"a": "failed", "b": "done"}


def test_an_unfinished_last_line_is_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", row("a"), end=json.dumps(row("b"))[:200])
    assert [cell.key for cell in read_cells([path])] == ["a"]
    path = write(tmp_path / "r.jsonl", row("a"), end=json.dumps(row("b")))
    assert [cell.key for cell in read_cells([path])] == ["a", "b"]


def test_an_out_of_memory_row_has_its_limit() -> None:
    oom = {"limit_bytes": 2**30}
    assert cell_from_json(row(status="oom", oom=oom), "r").limit_bytes == 2**30
    assert cell_from_json(row(oom=None), "r").limit_bytes is None
    limited = {**RECIPE.to_json(), "memory_limit_bytes": 2**28}
    assert cell_from_json(row(recipe=limited), "r").limit_bytes == 2**28
    died = cell_from_json({"kind": "cell", "key": "a", "status": "oom", "recipe": limited}, "r")
    assert (died.limit_bytes, died.figures) == (2**28, None)


def test_an_nvme_path_of_another_machine_need_not_exist(tmp_path: Path) -> None:
    nvme = TrainingRecipe(
        model="tiny", engine="deepspeed", precision="mixed", zero=3, offload="nvme", nvme_path=str(tmp_path)
    )
    gone = {**nvme.to_json(), "nvme_path": str(tmp_path / "gone")}
    assert cell_from_json(row(recipe=gone), "r").recipe.offload == "nvme"


def test_plain_measured_steps_are_cells() -> None:
    cells = read_cells([MEASURED])
    assert len(cells) == len(MEASURED.read_text().splitlines())
    assert {cell.status for cell in cells} == {CellStatus.DONE}
    assert all(cell.tokens_per_second and cell.figures and cell.figures.backend == "measured" for cell in cells)


def test_training_options_do_not_depend_on_how_the_step_was_run() -> None:
    measured = cell_from_json(row(recipe={**RECIPE.to_json(), "device": "cuda", "repeats": 3}), "r")
    other = cell_from_json(row(recipe={**RECIPE.to_json(), "batch": 5}), "r")
    assert measured.recipe.training == cell_from_json(row(), "r").recipe.training != other.recipe.training


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"status": "lost"}, "status 'lost' is not one of done, oom, failed"),
        ({"kind": "peak"}, "kind 'peak' is not a training step"),
        ({"schema": 2}, "schema 2 is not 1"),
        ({"recipe": None}, "'recipe' is missing"),
        ({"recipe": {"batch": "many"}}, "not a recipe of this version"),
        ({"recipe": {**RECIPE.to_json(), "soon": 1}}, "unknown recipe keys: soon"),
        ({"roles": {"hats": 1}}, "'hats' in 'roles' is unknown"),
        ({"tokens_per_second": float("inf")}, "'tokens_per_second' is not a finite number"),
        ({"reserved_bytes": "1"}, "'reserved_bytes' is not a number of bytes"),
        ({"error": 7}, "'error' is not a string"),
        ({"finished": "yesterday"}, "'finished' is not a time with a zone"),
        ({"finished": "2026-01-02T03:04:05"}, "'finished' is not a time with a zone"),
    ],
)
def test_an_invalid_row_is_refused_in_one_line_with_its_place(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "r.jsonl", row("a"), row("b", **changes))
    with pytest.raises(ResultFormatError, match="line 2: ") as refusal:
        read_cells([path])
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff\xfe", b"{", b'{"kind": "cell"}\n\n[]\n', b"1" * 5000])
def test_a_file_that_is_not_a_sweep_is_refused_in_one_line(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(content)
    with pytest.raises(ResultFormatError, match=r"r\.jsonl"):
        read_cells([path])
    with pytest.raises(ResultFormatError, match="no such file"):
        read_cells([tmp_path / "none.jsonl"])


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def refusal_of(values: dict[str, Any]) -> str:
    """Why a row is refused, "" where it is read."""
    try:
        cell_from_json(values, "strange.jsonl, line 1")
    except ResultFormatError as error:
        return str(error)
    return ""


@given(key=st.sampled_from(sorted(row())), value=ANYTHING)
def test_any_row_is_read_or_refused_in_one_line(key: str, value: object) -> None:
    assert "\n" not in refusal_of(row(**{key: value}))


@given(key=st.sampled_from(sorted(RECIPE.to_json())), value=ANYTHING)
def test_any_recipe_is_read_or_refused_in_one_line(key: str, value: object) -> None:
    assert "\n" not in refusal_of(row(recipe={**RECIPE.to_json(), key: value}))
