import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ligerprof.analyzers.estimate import estimate
from ligerprof.cli.main import main
from ligerprof.recipe.training import TrainingRecipe
from tests.paths import RECORDINGS

RECORDING = RECORDINGS / "hf-ckpt-4x1024.pickle.xz"


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["compare", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def write(path: Path, values: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values), encoding="utf-8")
    return path


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return write(tmp_path / "plain.json", estimate(TrainingRecipe(precision="bf16")).to_json())


@pytest.fixture
def fused(tmp_path: Path) -> Path:
    return write(tmp_path / "fused.json", estimate(TrainingRecipe(precision="bf16", liger="flce")).to_json())


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    recipe = TrainingRecipe(precision="bf16")
    estimated = estimate(recipe).to_json()
    step = {**estimated, "kind": "step", "backend": "simulated", "peak_bytes": estimated["peak_bytes"] + 2**20}
    step["roles"] = {**estimated["roles"], "other": estimated["roles"]["other"] + 2**20}
    write(tmp_path / "runs" / "001" / "result.json", {**step, "estimate": estimated})
    return tmp_path / "runs" / "001"


def test_two_estimates_are_compared_with_the_first(plain: Path, fused: Path) -> None:
    code, stdout, stderr = run(plain, fused, "--json")

    assert (code, stderr) == (0, "")
    values = json.loads(stdout)
    assert (values["schema"], values["kind"], values["reference"]) == (1, "compare", 0)
    first, second = values["columns"]
    assert (first["backend"], second["backend"]) == ("estimated", "estimated")
    assert (first["peak_difference_bytes"], first["error_ratio"]) == (0, 0.0)
    assert second["peak_difference_bytes"] == second["peak_bytes"] - first["peak_bytes"]
    assert sum(second["role_difference_bytes"].values()) == second["peak_difference_bytes"]


def test_the_reference_can_be_another_column(plain: Path, fused: Path) -> None:
    _, stdout, _ = run(plain, fused, "--reference", 2, "--json")

    values = json.loads(stdout)
    assert values["reference"] == 1
    assert values["columns"][1]["error_ratio"] == 0.0
    assert values["columns"][0]["error_ratio"] > 0


def test_a_single_run_is_compared_with_its_estimate(run_directory: Path) -> None:
    code, stdout, _ = run(run_directory)

    assert code == 0
    assert f"simulated: {run_directory}" in stdout.replace("\n", "")
    assert "simulated, MiB   estimated, MiB" in stdout
    assert "error: against simulated" in stdout


def test_runs_estimates_and_snapshots_can_be_mixed(run_directory: Path, plain: Path) -> None:
    code, stdout, _ = run(RECORDING, run_directory, plain, "--json")

    assert code == 0
    columns = json.loads(stdout)["columns"]
    assert [column["backend"] for column in columns] == ["snapshot", "simulated", "estimated"]
    assert columns[0]["peak_bytes"] == 14124071936


def test_an_estimate_comes_close_to_a_recording_role_by_role(plain: Path) -> None:
    _, stdout, _ = run(RECORDING, plain, "--json")

    measured, estimated = json.loads(stdout)["columns"]
    for role in ("parameters", "optimizer_states", "checkpoints", "activations", "ce_temporaries", "library_workspace"):
        assert estimated["roles"][role] == pytest.approx(measured["roles"][role], rel=0.005), role


def test_columns_of_one_kind_are_distinguished_by_name(plain: Path, fused: Path) -> None:
    _, stdout, _ = run(plain, fused)

    assert "plain estimated" in stdout
    assert "fused estimated" in stdout


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], "not a JSON object"),
        ({"schema": 7, "kind": "estimate"}, "schema 7 is not 1"),
        ({"schema": 1, "kind": "bench"}, "this is records of a bench"),
        ({"schema": 1, "kind": "step", "backend": "guessed"}, "backend 'guessed' is none of"),
        ({"schema": 1, "kind": "estimate"}, "'peak_bytes' is not a number of bytes"),
        ({"schema": 1, "kind": "estimate", "peak_bytes": True}, "'peak_bytes' is not a number of bytes"),
        ({"schema": 1, "kind": "estimate", "peak_bytes": 10**4000}, "'peak_bytes' is not a number of bytes"),
        ({"schema": 1, "kind": "estimate", "peak_bytes": 1, "phases": []}, "'phases' is missing or not an object"),
        ({"schema": 1, "kind": "estimate", "peak_bytes": 1, "phases": {"tea": 1}}, "'tea' in 'phases' is unknown"),
        (
            {"schema": 1, "kind": "estimate", "peak_bytes": 1, "phases": {}, "roles": {"logits": "1"}},
            "'roles.logits' is not a number of bytes",
        ),
        (
            {
                "schema": 1,
                "kind": "step",
                "backend": "measured",
                "peak_bytes": 1,
                "phases": {},
                "roles": {},
                "estimate": 3,
            },
            "(estimate): not a JSON object",
        ),
    ],
    ids=lambda value: None if isinstance(value, (dict, list)) else value,
)
def test_a_file_of_something_else_is_one_clear_line(tmp_path: Path, plain: Path, values: Any, text: str) -> None:
    code, stdout, stderr = run(plain, write(tmp_path / "strange.json", values))

    assert (code, stdout) == (1, "")
    assert text in stderr
    assert "strange.json" in stderr
    assert stderr.count("\n") == 1


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe{", b"[" * 100_000], ids=["cut", "empty", "bytes", "deep"])
def test_a_file_that_is_no_json_is_one_clear_line(tmp_path: Path, plain: Path, content: bytes) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)

    code, stdout, stderr = run(plain, path)

    assert (code, stdout, stderr.count("\n")) == (1, "", 1)
    assert f"broken.json: {'not readable as' if content else 'this is empty'}" in stderr


def test_a_folder_without_a_result_is_one_clear_line(tmp_path: Path, plain: Path) -> None:
    code, _, stderr = run(plain, tmp_path)

    assert (code, stderr.count("\n")) == (1, 1)
    assert "result.json: no such file" in stderr


def test_usage_errors_end_in_2(tmp_path: Path, plain: Path, fused: Path) -> None:
    assert run(tmp_path / "absent.json")[0] == 2
    assert run()[0] == 2
    assert run(plain)[0] == 2
    assert run(plain, fused, "--reference", 3)[0] == 2


def test_comparing_files_imports_no_torch(plain: Path, fused: Path) -> None:
    code = (
        "import sys\n"
        "from ligerprof.cli.main import main\n"
        "main(['compare', *sys.argv[1:]], standalone_mode=False)\n"
        "heavy = {'torch', 'triton', 'transformers', 'matplotlib', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, plain, fused], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
