import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ligerprof.cli.main import main
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.recipe.usable_memory import outside_bytes
from ligerprof.roles import Backend, Phase
from ligerprof.runs import step as steps
from ligerprof.runs.measured.ranks import merge_ranks
from ligerprof.runs.outcome import OutOfMemory, OutsideMemory, OutsideMoment, StepOutcome
from ligerprof.runs.simulated import simulate_step
from ligerprof.units import MIB

STEP = ("step", "--model", "tiny", "--seq", "32", "--device", "simulated")


def invoke(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, [str(each) for each in arguments], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def read(*arguments: object) -> dict[str, Any]:
    code, stdout, stderr = invoke(*arguments, "--json")
    assert code == 0, stderr
    found: dict[str, Any] = json.loads(stdout)
    return found


@pytest.fixture(scope="module")
def outcomes() -> dict[int, StepOutcome]:
    """Three ranks as if measured: rank 1 trained two sequences, the others one."""
    moments = tuple(
        OutsideMoment(moment=name, outside_bytes=size * MIB, reserved_bytes=0, process_bytes=None)
        for name, size in (("context", 500), ("step", 700))
    )
    outside = OutsideMemory(moments=moments, other_processes_bytes=0, driver_bytes=None)
    found = {}
    for rank, batch in enumerate((1, 2, 1)):
        outcome = simulate_step(TrainingRecipe(model="tiny", seq=32, batch=batch))
        found[rank] = replace(outcome, backend=Backend.MEASURED, notes=(), outside=outside)
    return found


@pytest.fixture
def run(tmp_path: Path, outcomes: dict[int, StepOutcome], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(steps, "_outcome", lambda *_arguments, **_options: merge_ranks(outcomes))
    assert invoke(*STEP, "--batch", "2", "-o", tmp_path / "run")[0] == 0
    return tmp_path / "run"


def test_result_lists_the_worst_rank_first_with_its_roles(run: Path, outcomes: dict[int, StepOutcome]) -> None:
    result = json.loads((run / "result.json").read_text())
    assert [each["rank"] for each in result["ranks"]] == [1, 0, 2]
    for each in result["ranks"]:
        assert each["peak_bytes"] == outcomes[each["rank"]].peak_bytes == sum(each["roles"].values())
        assert each["outside"]["outside_bytes"] == 700 * MIB
        assert each["oom"] is None
    assert result["peak_bytes"] == result["ranks"][0]["peak_bytes"]
    assert result["expected_outside_bytes"] == outside_bytes(TrainingRecipe(model="tiny"))
    assert result["roles"] == result["ranks"][0]["roles"]


def test_terminal_and_page_show_ranks_and_what_differs(
    tmp_path: Path, outcomes: dict[int, StepOutcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "_outcome", lambda *_arguments, **_options: merge_ranks(outcomes))
    monkeypatch.setenv("COLUMNS", "80")
    code, stdout, _ = invoke(*STEP, "--batch", "2", "-o", tmp_path / "run")
    assert code == 0
    assert "Rank 1 of 3 has the highest peak" in stdout
    assert "outside torch's allocator: 700.0 MiB, expected 676.8 MiB" in stdout
    assert max(len(line) for line in stdout.splitlines()) <= 100
    page = (tmp_path / "run" / "report.html").read_text()
    assert "<h2>Ranks</h2>" in page
    assert "Rank 1 of 3 has the highest peak" in page


def test_explain_reads_all_ranks_of_a_run(run: Path, outcomes: dict[int, StepOutcome]) -> None:
    found = read("explain", run, "--ranks")
    assert (found["kind"], found["worst_rank"]) == ("ranks", 1)
    # the recording also holds the build and the first step
    assert {each["rank"] for each in found["ranks"]} == set(outcomes)
    assert Path(found["ranks"][0]["source"]).name == "snapshot.pickle"
    # without the flag, the run is one recording as before
    assert read("explain", run)["kind"] == "peak"


def test_compare_shows_ranks_in_columns(run: Path) -> None:
    found = read("compare", run, "--ranks")
    assert [each["rank"] for each in found["columns"]] == [1, 0, 2]
    for each in found["columns"]:
        assert sum(each["role_difference_bytes"].values()) == each["peak_difference_bytes"]
    assert found["columns"][1]["peak_difference_bytes"] < 0
    _, stdout, _ = invoke("compare", run / "result.json", "--ranks")
    assert "difference: against rank 1" in stdout


def test_what_has_no_ranks_is_one_line(tmp_path: Path) -> None:
    assert invoke(*STEP, "-o", tmp_path / "one")[0] == 0
    for command, says in (("compare", "no ranks to compare"), ("explain", "not a run of several ranks")):
        code, stdout, stderr = invoke(command, tmp_path / "one", "--ranks")
        assert (code, stdout) == (1, "")
        assert says in stderr
    damaged = json.loads((tmp_path / "one" / "result.json").read_text()) | {"ranks": [{"rank": -1}, {"rank": "x"}]}
    (tmp_path / "one" / "result.json").write_text(json.dumps(damaged))
    assert "a rank is not a number" in invoke("explain", tmp_path / "one", "--ranks")[2]
    assert invoke("explain", tmp_path / "one" / "snapshot.pickle", "--ranks")[0] == 2
    assert invoke("compare", tmp_path / "one", tmp_path / "one", "--ranks")[0] == 2


def test_a_rank_out_of_memory_is_named_and_ends_in_3(
    tmp_path: Path, outcomes: dict[int, StepOutcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    oom = OutOfMemory(
        requested_bytes=1, allocated_bytes=2, reserved_bytes=3, limit_bytes=4, phase=Phase.BACKWARD, step=2
    )
    ranks = {**outcomes, 2: replace(outcomes[2], oom=oom)}
    monkeypatch.setattr(steps, "_outcome", lambda *_arguments, **_options: merge_ranks(ranks))
    code, stdout, _ = invoke(*STEP, "--batch", "2", "-o", tmp_path / "run", "--json")
    assert code == 3
    result = json.loads(stdout)
    assert [each["rank"] for each in result["ranks"]] == [2, 1, 0]
    assert result["ranks"][0]["oom"]["phase"] == "backward"
    assert result["notes"][0].startswith("rank 2 ran out of memory")
