"""`ligerprof run` around small commands; none of them uses a device."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ligerprof.cli.main import main


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["run", *arguments])


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("script", "exit_code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -TERM $$", 143)]
)
def test_exit_code_is_the_commands(script: str, exit_code: int, tmp_path: Path) -> None:
    assert run("--", "sh", "-c", script).exit_code == exit_code
    assert not (tmp_path / "runs").exists()


def test_output_passes_through_and_the_note_goes_to_stderr(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    result = run("--", "sh", "-c", r"printf '\000\377\n'; echo wrong >&2")

    written = capfdbinary.readouterr()
    assert (written.out, written.err) == (b"\x00\xff\n", b"wrong\n")
    assert result.stdout == ""
    assert "Note: nothing was recorded: no Python process of the command imported torch, or" in result.stderr


def test_a_program_that_uses_no_device_is_told_from_one_without_a_recording(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("class cuda:\n    _lazy_call = staticmethod(lambda start: None)\n")
    command = ["--json", "-o", "out", "--", sys.executable]

    (note,) = json.loads(run(*command, "-c", "import torch").stdout)["notes"]
    (hidden,) = json.loads(run(*command, "-S", "-c", "import sys; sys.path[:0] = ['.']; import torch").stdout)["notes"]

    assert note.startswith("nothing was recorded: no Python process of the command used a CUDA device")
    assert hidden.startswith("nothing was recorded: no Python process of the command imported torch, or")
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["torch.py"]


def test_json_is_alone_on_stdout(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    result = run("--json", "-o", "out", "--", "sh", "-c", "echo spoken; exit 4")

    written = capfdbinary.readouterr()
    assert (written.out, written.err) == (b"", b"spoken\n")
    answer = json.loads(result.stdout)
    assert (answer["schema"], answer["kind"], answer["exit_code"], answer["ranks"]) == (1, "run", 4, [])
    assert answer["command"] == ["sh", "-c", "echo spoken; exit 4"]
    assert result.exit_code == 4


def test_options_after_the_command_belong_to_it(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("echo", "--json", "--steps", "--help").exit_code == 0
    assert capfd.readouterr().out == "--json --steps --help\n"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("a: 1\n", "args.yaml: not the configuration of a training run"),
        ("per_device_train_batch_size: .nan\noutput_dir: o\n", "args.yaml: per_device_train_batch_size is nan"),
        (
            "num_generations: 8\nmodel_name_or_path: tiny\noutput_dir: o\n",
            "reinforcement learning is not supported yet",
        ),
        ("model_name_or_path: no/such\noutput_dir: o\n", "unknown model 'no/such'"),
        ("pipe-parallel-size: 1\n", "a configuration of GPT-NeoX"),
        ("a: [\n", "args.yaml: not readable as YAML"),
    ],
)
def test_a_file_that_is_no_recipe_costs_the_estimate_and_not_the_run(
    content: str, why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("args.yaml").write_text(content)
    result = run("--config", "args.yaml", "--fixed-config", "new.yaml", "--", "sh", "-c", "echo started; exit 4")
    assert (result.exit_code, capfd.readouterr().out) == (4, "started\n")
    first = result.stderr.splitlines()[0]
    assert first.startswith("no estimate and no changed lines are shown, and new.yaml is not written: ")
    assert why in first
    assert not Path("new.yaml").exists()


def test_a_file_that_is_not_there_is_an_error_before_the_command_starts(capfd: pytest.CaptureFixture[str]) -> None:
    result = run("--config", "sft.yaml", "--", "echo", "started")
    assert (result.exit_code, capfd.readouterr().out) == (2, "")
    assert result.stderr.startswith("Error: sft.yaml: ")


def test_nothing_is_overwritten_without_force(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    (tmp_path / "out" / "snapshot.pickle").write_text("an earlier run's")

    refused = run("-o", "out", "--", "sh", "-c", "touch ran")

    assert (refused.exit_code, (tmp_path / "ran").exists()) == (1, False)
    assert "not empty" in refused.stderr
    assert run("-o", "out", "--force", "--", "true").exit_code == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        ([], 2, "Missing argument"),
        (["--steps", "4:2", "--", "true"], 2, "'4:2': not steps"),
        (["--", "no-such-command"], 1, "Error: no-such-command: cannot be started (No such file or directory)"),
    ],
)
def test_what_cannot_run_is_one_line(arguments: list[str], exit_code: int, message: str) -> None:
    result = run(*arguments)

    assert (result.exit_code, message in result.stderr) == (exit_code, True)
    assert "Traceback" not in result.stderr
