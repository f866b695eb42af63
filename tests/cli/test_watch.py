"""`ligerprof watch`: a leak on the simulated GPU, and processes of every state."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ligerprof.cli.main import main
from ligerprof.runs.recording.live import LIVE, Live, Sample, scalars
from ligerprof.serialization import to_json

PROGRAM = """
import time, torch
model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.AdamW(model.parameters())
kept = []
for step in range(1000):
    result = model(torch.randn(512, 1024, device="cuda"))
    result.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    kept.append(result.detach().clone())
    time.sleep(0.05)
"""


def watch(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["watch", *map(str, arguments)])


def written(folder: Path, live: Live) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    values = {name: to_json(getattr(live, name)) for name in Live.__slots__}
    (folder / LIVE).write_text(json.dumps(values), encoding="utf-8")
    return folder


def grown(steps: int, growth_bytes: int) -> Live:
    samples = tuple(
        Sample(
            step=step,
            seconds=float(step),
            allocated_bytes=2**30 + growth_bytes * step,
            reserved_bytes=2**31,
            peak_bytes=2**30 + growth_bytes * step + 2**20,
            peak_reserved_bytes=2**31,
            roles={"parameters": 2**29},
        )
        for step in range(1, steps + 1)
    )
    return Live(pid=2**22 + 1, limit_bytes=2**32, samples=samples)


@pytest.mark.slow
def test_the_last_figures_are_those_of_the_recording_and_the_failure_is_foreseen(tmp_path: Path) -> None:
    program, run = tmp_path / "program.py", tmp_path / "run"
    program.write_text(PROGRAM, encoding="utf-8")
    options = ("--device", "simulated", "--memory-limit", "300MiB", "-o", str(run))
    assert CliRunner().invoke(main, ["run", *options, "--", sys.executable, str(program)]).exit_code == 3

    (process,) = json.loads(watch(run, "--once", "--json").stdout)["processes"]
    recording = json.loads((run / "recording.json").read_text(encoding="utf-8"))
    last = process["samples"][-1]
    assert process["ended"]
    assert (last["peak_bytes"], last["step"]) == (recording["counter_peak_bytes"], recording["steps"])
    assert process["growth_bytes"] == 2**21
    early = replace(Live.read(run), samples=Live.read(run).samples[:-1])
    assert early.fails_in_step == pytest.approx(recording["steps"], rel=0.05)


def test_growth_and_the_step_of_the_failure() -> None:
    live = grown(10, 2**24)

    assert live.growth_bytes == 2**24
    left = live.limit_bytes - 20 * 2**20 - live.samples[-1].peak_bytes
    assert live.fails_in_step == 10 + left // 2**24 + 1
    assert scalars(live)["memory_mib/growth_per_step"] == 16
    assert grown(10, 0).fails_in_step is None
    # too few steps to tell
    assert grown(4, 2**24).fails_in_step is None


def test_a_killed_process_is_an_error_after_its_last_figures(tmp_path: Path) -> None:
    written(tmp_path / "process-7", grown(8, 2**24))

    result = watch(tmp_path)

    assert result.exit_code == 1
    assert "in step 8, after 8.0 s: 1.13 GiB allocated" in result.stdout.replace("1152.0 MiB", "1.13 GiB")
    assert "It grows by 16.0 MiB per step. At this rate, memory runs out in about step" in result.stdout
    assert "process-7 ended without finishing its recording" in result.stderr


def test_an_ended_run_has_a_table_and_summaries(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    written(tmp_path / "run", replace(grown(8, 0), ended=True))

    result = watch(tmp_path / "run", "--tensorboard", tmp_path / "board")

    assert result.exit_code == 0, result.stderr
    assert "ended after step 8" in result.stdout
    assert "parameters" in result.stdout
    assert list((tmp_path / "board").glob("events.out.tfevents.*"))


def test_folders_without_a_run_are_errors(tmp_path: Path) -> None:
    assert watch(tmp_path / "no").exit_code == 1
    assert "no process of a `ligerprof run` has begun a step" in watch(tmp_path, "--once").stderr
    written(tmp_path, grown(3, 0))
    (tmp_path / LIVE).write_text('{"samples": [1]}', encoding="utf-8")
    assert "not what a recorder writes" in watch(tmp_path, "--once").stderr
