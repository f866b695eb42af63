"""`ligerprof run --device simulated`: whole programs without a GPU, against peaks that a GPU measured."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ligerprof.cli.main import main
from ligerprof.simulated_gpu.device import History
from ligerprof.snapshots.writer import EventContext
from tests.paths import REPOSITORY

SCRIPTS = REPOSITORY / "benchmarks/run_scripts"
MEASURED = {
    row["script"]: row
    for row in json.loads((REPOSITORY / "benchmarks/results/run-scripts-h200.json").read_text())["scripts"]
    if row["recorded"] == ":"
}
CHECKS = Path(__file__).with_name("checks.py")


def simulate(tmp_path: Path, *command: str, options: tuple[str, ...] = ()) -> "subprocess.CompletedProcess[str]":
    ours = [sys.executable, "-m", "ligerprof", "run", "--device", "simulated", *options]
    return subprocess.run(
        [*ours, "--json", "-o", str(tmp_path / "run"), "--", sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
    )


@pytest.mark.parametrize(
    "name",
    [
        "functional",
        "leaking",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("oom_caught", "step_in_backward")),
    ],
)
def test_the_peak_is_the_gpus_to_the_byte(name: str, tmp_path: Path) -> None:
    measured = MEASURED[name]
    done = simulate(tmp_path, str(SCRIPTS / f"{name}.py"))
    assert done.returncode == measured["exit_code"], done.stderr
    rank: dict[str, Any] = json.loads(done.stdout)["ranks"][0]
    assert rank["peak_bytes"] == measured["torch_peaks"][0]
    assert rank["simulated"]["gpu"] == "h200"


def test_torch_answers_as_on_a_gpu(tmp_path: Path) -> None:
    done = simulate(tmp_path, str(CHECKS), "--exit", options=("--gpu", "rtx4090"))
    assert "all checks passed" in done.stderr, done.stderr
    # os._exit ends the program, and not the recording
    assert done.returncode == 5
    made_up = json.loads(done.stdout)["ranks"][0]["simulated"]["made_up"]
    assert {row["what"] for row in made_up} == {"item of bool"}
    assert all(Path(row["place"].rpartition(":")[0]) == CHECKS for row in made_up)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.slow
def test_compiled_functions_allocate_what_inductor_lets_them(tmp_path: Path) -> None:
    compiled = Path(__file__).with_name("compiled_checks.py")
    done = simulate(tmp_path, str(compiled))
    assert "all checks passed" in done.stderr, done.stderr
    made_up = json.loads(done.stdout)["ranks"][0]["simulated"]["made_up"]
    # Inductor copies what a trial of a kernel overwrites to the host where the GPU has no room for a copy
    assert not [row for row in made_up if "torchinductor" not in row["place"]]
    assert "all checks passed" in simulate(tmp_path, str(compiled), "--eager", options=("--eager", "--force")).stderr


@pytest.mark.slow
def test_a_program_goes_on_when_it_catches_the_error_of_memory_that_runs_out(tmp_path: Path) -> None:
    done = simulate(tmp_path, str(CHECKS), "--out-of-memory", options=("--gpu", "rtx4090"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ranks"][0]["oom"]["requested_bytes"] == 7 << 30


def test_memory_that_runs_out_ends_with_3(tmp_path: Path) -> None:
    program = tmp_path / "grows.py"
    program.write_text("import torch\nkept = [torch.empty(1 << 28, device='cuda') for _ in range(9)]\n")
    done = simulate(tmp_path, str(program), options=("--memory-limit", "8GiB"))
    assert done.returncode == 3
    assert json.loads(done.stdout)["ranks"][0]["oom"]["requested_bytes"] == 1 << 30


TRAINS = """
import json, torch
model = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(model.parameters())
for step in range(9):
    loss = model(torch.randn(8, 256, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    if loss > 3:
        print("diverged")
    with open("metrics.json", "a") as file:
        json.dump(loss.item(), file)
    torch.save(model.state_dict(), "model.pt")
"""


def test_the_report_names_steps_branches_and_files(tmp_path: Path) -> None:
    program, metrics = tmp_path / "train.py", tmp_path / "metrics.json"
    program.write_text(TRAINS)
    metrics.write_text("mine")
    done = subprocess.run(
        [sys.executable, "-m", "ligerprof", "run", "--device", "simulated", "--steps", "2:3", "--", "train.py"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "80"},
    )
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stderr.split())
    assert "The command ran 3 training steps, recorded up to step 3" in words
    assert "- item of bool at train.py:9, 3 times; the program branches on it" in words
    assert "- item of float32 at train.py:12, 3 times" in words
    assert "follows from made-up values: model.pt." in words
    assert "wrote to them or removed them: metrics.json." in words
    assert max(map(len, done.stderr.splitlines())) <= 80
    assert metrics.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.json", "runs", "train.py"]
    page = tmp_path / "page.html"
    shown = CliRunner().invoke(main, ["explain", str(tmp_path / "runs/001"), "--json", "--html", str(page)])
    assert json.loads(shown.stdout)["simulated"] == "NVIDIA H200"
    assert "simulated for NVIDIA H200" in page.read_text()


def test_options_of_the_simulation_need_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ligerprof", "run", "--gpu", "h200", "--", "true"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert "--device simulated" in done.stderr


def test_events_of_the_garbage_collector_do_not_come_between_those_that_are_read() -> None:
    context = EventContext("")
    history = History(None)

    class Freed:
        """Adds an event when the collector finds it."""

        def __del__(self) -> None:
            history.append("free_completed", 1, 1, context, 0, None)

    for number in range(1000):
        history.append("alloc", number, 1, context, 0, None)
        cycle = [Freed()]
        cycle.append(cycle)  # type: ignore[arg-type]
    del cycle
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        events = [event for event in history if event.action == "alloc"]
    finally:
        gc.set_threshold(*threshold)
    assert [event.address for event in events] == list(range(1000))


def test_optimizer_steps_that_move_no_memory_count_in_their_phase(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, torch\n"
        "model = torch.nn.Linear(64, 64, device='cuda')\n"
        "optimizer = torch.optim.AdamW(model.parameters(), fused=True)\n"
        "kept = []\n"
        "for step in range(3):\n"
        "    kept.append(torch.ones(2**20, device='cuda'))\n"
        "    model(torch.ones(8, 64, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n"
        "    print('held', torch.cuda.memory_allocated(), file=sys.stderr)\n"
        "    optimizer.zero_grad()\n"
    )
    done = simulate(tmp_path, str(program))
    held = [int(line.split()[1]) for line in done.stderr.splitlines() if line.startswith("held ")]
    assert len(held) == 3
    assert json.loads(done.stdout)["ranks"][0]["phases"]["optimizer"] == max(held)
