import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ligerprof.cli.main import main
from ligerprof.cli.sweep import command
from ligerprof.recipe.training import RECIPE_OPTIONS
from ligerprof.runs.sweep.cells import LOCK

TINY = ("--model", "tiny", "--seq", "64", "--device", "simulated")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["sweep", *arguments], catch_exceptions=False)


def planned(*arguments: str) -> list[dict[str, Any]]:
    result = run(*TINY, *arguments, "--dry-run", "--json")
    assert result.exit_code == 0, result.stderr
    cells: list[dict[str, Any]] = json.loads(result.stdout)["cells"]
    return cells


def wait_for(condition: Any, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def processes_with(text: str) -> list[int]:
    """Processes whose command line contains the text."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                arguments = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if text in arguments:
                found.append(int(entry.name))
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
@pytest.mark.usefixtures("quick_cells")
def test_a_killed_sweep_continues_without_running_finished_cells_again(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    results = folder / "results.jsonl"
    sweep = [sys.executable, "-m", "ligerprof", "sweep", *TINY, "--batch", "1,2", "--memory-limit", "71MiB"]
    sweep += ["-o", str(folder)]
    first = subprocess.Popen(sweep, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    # one cell has finished, the other is running
    wait_for(lambda: results.exists() and results.read_bytes().endswith(b"\n"))
    finished = results.read_bytes()
    done = json.loads(finished)
    assert list(done)[:6] == ["schema", "kind", "key", "status", "error", "seconds"]
    assert (done["kind"], done["status"], done["error"], done["backend"]) == ("cell", "done", None, "simulated")
    assert done["peak_bytes"] == sum(done["roles"].values())
    wait_for(lambda: len(list((folder / "runs").glob("*.log"))) == 2)
    os.killpg(first.pid, signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    # the cell that ran has ended with its sweep
    wait_for(lambda: processes_with(str(folder)) == [])
    assert results.read_bytes() == finished
    # a kill in the middle of a line
    with results.open("ab") as file:
        file.write(finished[: len(finished) // 2])
    second = run(*sweep[4:], "--json")
    lines = results.read_bytes().splitlines(keepends=True)
    assert lines[0] == finished
    assert [json.loads(line)["status"] for line in lines] == ["done", "oom"]
    printed = json.loads(second.stdout)
    assert printed["cells"] == [json.loads(line) for line in lines]
    assert (folder / "runs" / done["key"] / "snapshot.pickle").exists()
    # a cell has the result of a step on its own
    alone = ["step", *TINY, "--batch", "1", "--memory-limit", "71MiB", "-o", str(tmp_path / "alone"), "--json"]
    step = json.loads(CliRunner().invoke(main, alone, catch_exceptions=False).stdout)
    changing = {"kind": "cell", "run": done["run"], "finished": done["finished"]}
    assert {**done, **step, **changing} == done
    assert printed["counts"] == {"done": 1, "oom": 1, "failed": 0, "left_out": 0}
    # a third start runs nothing and shows the results
    shown = run(*sweep[4:])
    assert (shown.exit_code, shown.stderr) == (0, "2 of 2 cells were done before\n")
    assert "simulated for an" in shown.stdout
    assert results.read_bytes() == b"".join(lines)


@pytest.mark.usefixtures("quick_cells")
def test_a_failed_cell_has_a_row_and_the_exit_code_is_1(tmp_path: Path) -> None:
    # only the cell itself detects an unknown provider
    result = run(*TINY, "--batch", "1", "--liger", "rms", "--provider", "unknown", "-o", str(tmp_path / "sweep"))
    assert (result.exit_code, result.stderr.splitlines()[-1][:24]) == (1, "Error: 1 of 1 cells fail")
    (failed,) = (json.loads(line) for line in (tmp_path / "sweep" / "results.jsonl").read_text().splitlines())
    assert failed["status"] == "failed"
    assert "unknown" in failed["error"]
    assert failed["recipe"]["provider"] == "unknown"
    assert max(len(line) for line in result.stdout.splitlines()) <= 100


def test_every_option_of_a_recipe_takes_several_values() -> None:
    names = {*RECIPE_OPTIONS, "configs"}
    grid = {option.name for option in command.params if isinstance(option, type(command.params[0])) and option.multiple}
    assert grid == names


@pytest.mark.parametrize(
    ("arguments", "field", "values"),
    [
        (("--batch", "1,4", "--batch", "8"), "batch", [1, 4, 8]),
        (("--liger", "rms+rope,all"), "liger", ["rms+rope", "all"]),
        (("--checkpointing", "on,off"), "checkpointing", [True, False]),
        (("--no-checkpointing",), "checkpointing", [False]),
        (("--reentrant",), "reentrant", [True]),
        (("--lora", "none,8"), "lora", [None, 8]),
        (("--memory-limit", "none,1GiB"), "memory_limit_bytes", [None, 2**30]),
        (("--alloc-conf", "a:1,b:2", "--alloc-conf", "c:3"), "alloc_conf", ["a:1,b:2", "c:3"]),
        (("--liger", "flce", "--flce-budget", "lean,1MiB"), "flce_budget", ["lean", 2**20]),
        (("--optimizer", "none,sgd"), "optimizer", ["none", "sgd"]),
    ],
)
def test_values_are_read_as_step_reads_them(arguments: tuple[str, ...], field: str, values: list[Any]) -> None:
    assert [cell["recipe"][field] for cell in planned(*arguments)] == values


def test_a_plan_has_estimates_and_shows_finished_cells(tmp_path: Path) -> None:
    text = run(*TINY, "--batch", "1,2", "--dry-run", "-o", str(tmp_path / "sweep"))
    assert "to run" in text.stdout
    assert not (tmp_path / "sweep").exists()
    cells = planned("--batch", "1,2")
    assert all(cell["estimated_peak_bytes"] > 60 * 2**20 for cell in cells)
    assert cells[0]["estimated_peak_bytes"] < cells[1]["estimated_peak_bytes"]


@pytest.mark.parametrize(
    ("arguments", "exit_code", "says"),
    [
        (("--batch", "1,0"), 2, "It must be at least 1"),
        (("--batch", "1,,2"), 2, "empty value"),
        (("--checkpointing", "maybe"), 2, "neither on nor off"),
        (("--memory-limit", "lots"), 2, "not a size"),
        (("--liger", "none,flce", "--loss", "hf,hf-4.45"), 2, "1 of 4 combinations cannot be trained"),
        (("--liger", "flce", "--loss", "hf-4.45", "--skip-invalid"), 2, "1 of 1 combinations cannot be trained"),
        (
            ("--engine=deepspeed", "--precision=mixed", "--zero=3", "--offload=nvme", "--nvme-path=."),
            2,
            "simulator does not cover",
        ),
        (("--device", "cuda", "--jobs", "2"), 2, "--jobs 2"),
    ],
)
def test_an_invalid_sweep_is_refused_in_one_line_before_anything_runs(
    arguments: tuple[str, ...], exit_code: int, says: str, tmp_path: Path
) -> None:
    result = run("--model", "tiny", "--device", "simulated", *arguments, "-o", str(tmp_path / "sweep"))
    assert result.exit_code == exit_code
    assert says in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert not (tmp_path / "sweep").exists()


def test_skip_invalid_leaves_out_invalid_combinations() -> None:
    cells = planned("--liger", "none,flce", "--loss", "hf,hf-4.45", "--skip-invalid")
    assert [(cell["recipe"]["loss"], cell["recipe"]["liger"]) for cell in cells] == [
        ("hf", "none"),
        ("hf", "flce"),
        ("hf-4.45", "none"),
    ]


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    import fcntl

    folder = tmp_path / "sweep"
    folder.mkdir()
    (folder / "sweep.json").write_text('{"grids": []}')
    with (folder / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        result = run(*TINY, "-o", str(folder))
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "another sweep" in result.stderr
