"""`fit -- COMMAND` and `advise -- COMMAND`, as a user calls them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from ligerprof.cli.main import main
from ligerprof.units import MIB

PROGRAMS = Path(__file__).parents[1] / "programs"
pytestmark = pytest.mark.timeout(300)
# reads its values from a file, and needs about 34 MiB more for each sequence of a micro-batch
PLAIN = """
import sys
import torch, yaml
values = yaml.safe_load(open(sys.argv[1]))
layers = torch.nn.ModuleList(torch.nn.Linear(512, 512) for _ in range(12)).cuda()
optimizer = torch.optim.AdamW(layers.parameters())
for _ in range(3):
    for _ in range(values["grad_accum"]):
        x = torch.randn(values["batch"] * 1024, 512, device="cuda")
        for layer in layers:
            x = torch.relu(layer(x))
        x.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print("trained", file=open("log.txt", "a"))
"""
TRAINER = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=128, n_head=4, vocab_size=1000, n_positions=256))
rows = [{"input_ids": torch.ones(256, dtype=torch.long), "labels": torch.ones(256, dtype=torch.long)}] * 64
Trainer(model, arguments, train_dataset=rows).train()
"""

# splits its weight; the first rank has another one
RANKS = """
import os, sys
import torch
rows = 4096 // int(sys.argv[sys.argv.index("--tp_size") + 1])
layer = torch.nn.Linear(1024, rows * (1 if int(os.environ["RANK"]) else 2)).cuda()
optimizer = torch.optim.AdamW(layer.parameters())
for _ in range(3):
    layer(torch.randn(8, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def search(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, list(arguments))
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.slow
def test_fit_writes_the_file_that_fits_and_leaves_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(PLAIN)
    Path("run.yaml").write_text("batch: 1\ngrad_accum: 4  # of a step\n")
    before = sorted(path.name for path in tmp_path.iterdir())
    arguments = ("--gpu", "h200", "--memory-limit", "240MiB", "-o", "fits.yaml", "--at-once", "2", "--json")
    code, stdout, stderr = search("fit", *arguments, "--", sys.executable, "train.py", "run.yaml")
    found = json.loads(stdout)
    assert code == 0, stderr
    assert (found["kind"], found["limit_bytes"], found["key"]) == ("fit", 240 * MIB, "batch")
    assert found["wanted"] == {"value": 1, "fits": True, "verdict": "fits"}
    # micro-batches that divide the step of four sequences
    assert (found["value"], found["next_value"], found["bounded_by"]) == (2, 4, "memory")
    assert found["plan"]["command"][1:] == ["train.py", "fits.yaml"]
    assert found["plan"]["reserved_bytes"] <= 240 * MIB
    outcomes = {(trial["value"], trial["limit_bytes"]): trial["outcome"] for trial in found["trials"]}
    assert outcomes[2, 240 * MIB] == "ran"
    assert Path("fits.yaml").read_text() == "batch: 2\ngrad_accum: 2  # of a step\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*before, "fits.yaml"])
    # the file is not overwritten
    code, _, stderr = search("fit", *arguments, "--", sys.executable, "train.py", "run.yaml")
    assert (code, "fits.yaml" in stderr) == (1, True)


@pytest.mark.slow
def test_advise_finds_the_cheapest_arguments_of_a_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAINER)
    command = (sys.executable, "train.py", "--output_dir", "out", "--per_device_train_batch_size", "16")
    limit = ("--gpu", "h200", "--memory-limit", "110MiB")
    code, stdout, stderr = search("advise", *limit, "--json", "--", *command)
    found = json.loads(stdout)
    assert code == 0, stderr
    assert found["fits"] is False
    applied = [step["name"] for step in found["steps"] if step["state"] == "applied"]
    assert applied
    assert found["plan"]["reserved_bytes"] <= 110 * MIB
    assert not Path("out").exists()
    # the plan is a command that runs, and none of its changes can be left out
    assert found["trials"][0]["changes"] == "unchanged"
    code, stdout, stderr = search(
        "run", "--device", "simulated", *limit, "--steps", "1:2", "--json", "--", *found["plan"]["command"]
    )
    assert code == 0, stderr


def test_the_splits_of_a_world_that_fit(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(RANKS)
    command = (sys.executable, str(program), "--tp_size", "1")
    options = ("--world", "16", "--vary", "tp_size=1,4", "--gpu", "h200", "--memory-limit", "180MiB", "--at-once", "2")
    code, stdout, stderr = search("fit", *options, "--json", "--", *command)
    found = json.loads(stdout)
    assert code == 0, stderr
    assert (found["kind"], found["world"], found["command"]) == ("splits", 16, list(command))
    whole, split = found["splits"]
    assert (whole["split"], whole["outcome"], [rank["rank"] for rank in whole["ranks"]]) == (
        "data 16",
        "out of memory",
        [0],
    )
    assert (split["split"], split["fits"], split["changes"]) == ("tensor 4, data 4", True, {"tp_size": 4})
    assert split["command"] == [*command[:-1], "4"]
    # the worst first
    assert [rank["rank"] for rank in split["ranks"]] == [0, 15]
    assert split["ranks"][0]["reserved_bytes"] == split["reserved_bytes"] > split["ranks"][1]["reserved_bytes"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("fit", "--world", "8"), 2, "--world needs a command after --."),
        (("fit", "--world", "8", "--fastest", "--", "python", "a.py", "--batch", "1"), 2, "Leave --world out"),
        (("fit", "--world", "8", "--", "python", "a.py", "--batch", "1"), 2, "has a parallel degree"),
        (
            ("fit", "--", "python", "a.py", "--rows", "3"),
            2,
            "a.py: no argument or key has its batch size (looked for: ",
        ),
        (("fit", "--model", "tiny", "--", "python", "a.py"), 2, "--model does not go with a command after --"),
        (("fit", "--vary", "batch=1,2"), 2, "--vary needs a command after --."),
        (("advise", "--at-once", "2"), 2, "--at-once needs a command after --."),
        (("fit", "--vary", "batch", "--", "python", "a.py"), 2, "'batch': not KEY=V1,V2,…"),
        (("fit", "--", "python", "a.py", "--config", "absent.yaml"), 2, "absent.yaml: no such file"),
        (("fit", "-o", "x.yaml", "--", "python", "a.py", "--batch", "1"), 1, "names 0 configuration files"),
        (("fit", "--", "no-such-program", "--batch", "1"), 1, "no-such-program: cannot be started"),
    ],
)
def test_what_a_user_can_do_wrong(arguments: tuple[str, ...], code: int, message: str) -> None:
    found, _, stderr = search(*arguments)
    assert message in stderr
    assert found == code


def test_a_program_that_fails_is_shown(tmp_path: Path) -> None:
    program = tmp_path / "broken.py"
    program.write_text("raise KeyError('rows')")
    code, stdout, stderr = search("fit", "--", sys.executable, str(program), "--batch", "4")
    assert code == 1
    assert "fails, KeyError: 'rows'" in stdout
    assert "the command fails on the simulated GPU: KeyError: 'rows'" in stderr


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_the_trials(tmp_path: Path, sent: signal.Signals, code: int) -> None:
    program = tmp_path / "waits.py"
    program.write_text("import os, sys, time; sys.argv[1:]; open(f'{os.getpid()}.pid', 'w').close(); time.sleep(600)")
    start = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    start += "; from ligerprof.__main__ import run; run()"
    words = ["fit", "--at-once", "2", "--", sys.executable, str(program), "--batch", "4"]
    process = subprocess.Popen(
        [sys.executable, "-c", start, *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while len(begun := list(tmp_path.glob("*.pid"))) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(sent)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code, output
    assert not any(Path("/proc", each.stem).exists() for each in begun)
    # what the programs wrote is gone
    assert sorted(path.name for path in tmp_path.iterdir()) == ["waits.py"]
    if sent is signal.SIGINT:
        assert "No batch is known to fit" in output
