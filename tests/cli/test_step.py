import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ligerprof.cli.main import main
from ligerprof.roles import Role

TINY = ("step", "--model", "tiny", "--batch", "2", "--seq", "64")
SIMULATED = (*TINY, "--device", "simulated")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), catch_exceptions=False)


@pytest.fixture(scope="module")
def stepped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A simulated step with every kernel: its run directory and what --json printed."""
    folder = tmp_path_factory.mktemp("step") / "run"
    result = run(*SIMULATED, "--liger", "all", "--json", "-o", str(folder))
    assert result.exit_code == 0, result.stderr
    return folder, json.loads(result.stdout)


def test_json_holds_the_contract(stepped: tuple[Path, dict[str, Any]]) -> None:
    _, result = stepped
    assert (result["schema"], result["kind"], result["backend"]) == (1, "step", "simulated")
    assert result["step_seconds"] is None
    assert result["tokens_per_second"] is None
    assert result["oom"] is None
    assert sorted(result["phases"]) == ["backward", "forward", "optimizer"]
    assert max(result["phases"].values()) == result["peak_bytes"]
    assert set(result["roles"]) == {role.value for role in Role}
    assert sum(result["roles"].values()) == result["peak_bytes"]
    assert result["error_ratio"] == result["estimate"]["peak_bytes"] / result["peak_bytes"] - 1
    assert any("not measured" in note for note in result["notes"])


def test_the_run_directory_is_whole(stepped: tuple[Path, dict[str, Any]]) -> None:
    folder, result = stepped
    assert {path.name for path in folder.iterdir()} >= {"recipe.json", "result.json", "snapshot.pickle", "report.html"}
    assert json.loads((folder / "result.json").read_text()) == result
    page = (folder / "report.html").read_text()
    assert "simulated for an NVIDIA H200" in page
    # nothing is loaded from anywhere: the only addresses are XML's names
    assert "src=" not in page
    assert "@import" not in page


def test_explain_and_compare_read_the_run(stepped: tuple[Path, dict[str, Any]]) -> None:
    folder, result = stepped
    explained = json.loads(run("explain", str(folder), "--json").stdout)
    assert explained["peak_bytes"] == max(result["peak_bytes"], result["first_step_peak_bytes"])
    compared = run("compare", str(folder), str(folder), "--json")
    assert compared.exit_code == 0, compared.stderr


def test_torch_reads_the_snapshot(stepped: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, _ = stepped
    page = tmp_path / "plot.html"
    command = ["trace_plot", str(folder / "snapshot.pickle"), "-o", str(page)]
    subprocess.run([sys.executable, "-m", "torch.cuda._memory_viz", *command], check=True, capture_output=True)
    assert page.stat().st_size > 0


def test_a_full_folder_is_not_overwritten(stepped: tuple[Path, dict[str, Any]]) -> None:
    folder, result = stepped
    refused = run(*SIMULATED, "-o", str(folder))
    assert (refused.exit_code, refused.stderr.count("\n")) == (1, 1)
    assert "--force" in refused.stderr
    assert json.loads((folder / "result.json").read_text()) == result


def test_the_report_is_marked_as_simulated_and_fits_100_columns(tmp_path: Path) -> None:
    result = run(*SIMULATED, "-o", str(tmp_path / "run"), "--gpu", "rtx4090")
    assert "simulated for an NVIDIA GeForce RTX 4090 (no GPU was used)" in result.stdout
    assert max(len(line) for line in result.stdout.splitlines()) <= 100


def test_a_folder_whose_name_is_not_text_gets_the_run(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"runs\xff\n")
    result = run(*SIMULATED, "-o", str(folder))
    assert result.exit_code == 0, result.stderr
    assert {"result.json", "snapshot.pickle"} <= {path.name for path in folder.iterdir()}
    # the line with its name stays one line
    (shown,) = (line for line in result.stdout.splitlines() if line.startswith("run: "))
    assert shown.isascii(), shown
    assert folder.name not in shown


@pytest.mark.slow
def test_a_python_without_docstrings_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-OO", "-m", "ligerprof", *SIMULATED], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("Run python without -OO.")


def test_out_of_memory_is_a_result_with_exit_code_3(tmp_path: Path) -> None:
    result = run(*SIMULATED, "--memory-limit", "50MiB", "--json", "-o", str(tmp_path / "run"))
    assert result.exit_code == 3, result.stderr
    values = json.loads(result.stdout)
    oom = values["oom"]
    assert oom["limit_bytes"] == 50 * 2**20
    assert oom["reserved_bytes"] <= oom["limit_bytes"] < oom["reserved_bytes"] + oom["needed_bytes"]
    assert oom["missing_bytes"] == oom["reserved_bytes"] + oom["needed_bytes"] - oom["limit_bytes"]
    assert (oom["why"], oom["missing_is_bound"]) == ("limit", False)
    assert sum(oom["roles"].values()) == oom["allocated_bytes"]
    assert sum(free["bytes"] for free in oom["free"]) == oom["reserved_bytes"] - oom["allocated_bytes"]
    assert (values["error_ratio"], values["reached_phases"]) == (None, [])


def test_the_report_of_a_failure_compares_only_what_was_reached(tmp_path: Path) -> None:
    options = ("--model", "tiny", "--batch", "8", "--seq", "512", "--device", "simulated", "--memory-limit", "130MiB")
    result = run("step", *options, "-o", str(tmp_path / "run"))
    lines = result.stdout.splitlines()

    assert result.exit_code == 3
    assert lines[2].startswith("Out of memory in backward of step 2: ")
    assert lines[3].startswith("Out of memory in ")
    text = " ".join(result.stdout.split())
    assert "The limit on reserved memory is 130.0 MiB" in text
    # the forward pass ended, backward and the optimizer step did not
    assert "Reached before: forward" in text
    assert "Reached before: backward" not in text
    assert "Estimated for a whole step" in text
    assert "n/a" not in text
    assert text.count("%") > 3
    assert "estimated, MiB" not in text
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Roles at the failure" in page
    assert "<h2>Phases</h2>" not in page

    compared = run("compare", str(tmp_path / "run"))
    assert compared.exit_code == 0
    assert "simulated: out of memory in backward of step 2: " in compared.stdout
    assert "%" not in compared.stdout


@pytest.mark.parametrize(
    ("options", "exit_code", "says"),
    [
        (("--device", "cuda"), 1, "no CUDA device"),
        (("--device", "simulated", "--attention", "flash"), 1, "step: --attention flash is not supported yet"),
        (("--device", "simulated", "--liger", "rms", "--provider", "missing"), 2, "missing"),
        (("--device", "simulated", "--gpu", "mi300x"), 1, "step: --gpu mi300x"),
        (
            ("--engine=deepspeed", "--precision=mixed", "--zero=3", "--offload=nvme", "--nvme-path=."),
            1,
            "step: the simulator does not cover",
        ),
        (("--liger", "gelu"), 2, "unknown kernel"),
        (("--model", "nowhere"), 2, "unknown model"),
        (("--batch", "0"), 2, "--batch"),
        (("--memory-limit", "lots"), 2, "not a size"),
    ],
)
def test_what_cannot_run_is_one_line_and_leaves_nothing(
    options: tuple[str, ...], exit_code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = run(*TINY, *options, "-o", str(tmp_path / "run"))
    assert result.exit_code == exit_code
    assert says in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("option", ["--lora", "--qlora"])
def test_a_missing_package_is_reported_before_a_run_directory_is_made(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ligerprof.recipe.conflicts.find_spec", lambda _name: None)
    result = run(*SIMULATED, option, "4")
    assert (result.exit_code, result.stderr) == (
        1,
        f"Error: step: {option} needs peft. Install it with: pip install peft.\n",
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_compiled_step_keeps_and_makes_less(tmp_path: Path) -> None:
    eager, compiled = (
        json.loads(run(*SIMULATED, "--no-checkpointing", "--json", "-o", str(tmp_path / name), *option).stdout)
        for name, option in (("eager", ()), ("compiled", ("--compile",)))
    )
    assert compiled["peak_bytes"] < eager["peak_bytes"]
    assert compiled["roles"]["parameters"] == eager["roles"]["parameters"]
    assert sum(compiled["roles"].values()) == compiled["peak_bytes"]


@pytest.mark.gpu
@pytest.mark.parametrize("option", ["--liger=all", "--compile"])
def test_a_measured_step_agrees_with_the_simulation(tmp_path: Path, option: str) -> None:
    options = (*TINY, option, "--repeats", "2", "--json")
    # a measured step needs a process that holds nothing of the GPU
    command = [sys.executable, "-m", "ligerprof", *options, "--device", "cuda", "-o", str(tmp_path / "cuda")]
    measured = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    simulated = json.loads(run(*options, "--device", "simulated", "-o", str(tmp_path / "simulated")).stdout)
    assert measured["backend"] == "measured"
    assert measured["step_seconds"] > 0
    assert abs(simulated["peak_bytes"] / measured["peak_bytes"] - 1) < 0.002
    assert (tmp_path / "cuda" / "tensorboard").is_dir()
