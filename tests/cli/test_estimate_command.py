"""`ligerprof estimate -- COMMAND`: a training command in place of a configuration file."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ligerprof.cli.main import main

TRAINER = shlex.split("--model_name_or_path tiny --output_dir o --bf16 --dtype float32 --max_seq_length 128")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working folder, without settings of accelerate."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["estimate", *arguments])


def estimated(*arguments: str) -> dict[str, Any]:
    done = run("--json", *arguments)
    assert done.exit_code == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_a_command_and_a_file_of_the_same_arguments_give_the_same_estimate() -> None:
    keys = {"model_name_or_path": "tiny", "output_dir": "o", "bf16": True, "dtype": "float32", "max_seq_length": 128}
    Path("args.json").write_text(json.dumps(keys))
    typed, read = estimated("--", "python", "train.py", *TRAINER), estimated("--config", "args.json")
    assert typed["peak_bytes"] == read["peak_bytes"]
    assert typed["config"]["files"] == [{"file": "train.py", "framework": "transformers"}]
    assert typed["config"]["read"] == read["config"]["read"]
    line = estimated("--", "CUDA_VISIBLE_DEVICES=0 \\\n python train.py " + " ".join(TRAINER))
    assert line["peak_bytes"] == read["peak_bytes"]


def test_options_win_over_the_command_which_wins_over_files() -> None:
    Path("args.json").write_text(
        json.dumps({"per_device_train_batch_size": 16, "output_dir": "o", "optim": "adafactor"})
    )
    command = ["--config", "args.json", "--", "python", "train.py", *TRAINER, "--per_device_train_batch_size", "2"]
    assert "tiny, 2 x 128 tokens, amp, not checkpointed, adafactor-hf" in run(*command).stdout
    # options after the command are the command's
    done = run("--batch", "3", *command, "--batch", "5")
    assert "tiny, 3 x 128 tokens" in done.stdout
    assert "unknown keys: batch" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "exit_code", "says"),
    [
        (["--", "trl", "dpo", "--model_name_or_path", "tiny"], 1, "Error: trl dpo: DPO or another preference method"),
        (["--", "swift", "sft", "--model", "m"], 2, "Error: swift: a command of ms-swift"),
        (["llama3.1-8b"], 2, "Error: llama3.1-8b: no training command"),
        (
            ["--", "python train.py --per_device_train_batch_size $B --output_dir o"],
            2,
            "is $B, and nothing here sets $B",
        ),
        (
            ["--", "accelerate", "launch", "--use_deepspeed", "train.py", *TRAINER, "--optim", "paged_adamw_8bit"],
            1,
            "Here --",
        ),
    ],
)
def test_errors_are_one_line_and_name_the_place(arguments: list[str], exit_code: int, says: str) -> None:
    done = run(*arguments)
    assert (done.exit_code, done.stdout) == (exit_code, "")
    error = done.stderr.splitlines()[-1]
    assert error.startswith("Error: ")
    assert says in error
    assert "Traceback" not in done.stderr
