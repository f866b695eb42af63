"""The examples in the help of each command: they are shown whole, and they run."""

import json
import shlex
import shutil
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ligerprof.cli.command import EXAMPLES
from ligerprof.cli.main import COMMANDS, main
from ligerprof.runs.bench.records import Finding, write_lines
from tests.cli.test_bench import ENVIRONMENT, example_records
from tests.paths import DATA, RECORDINGS

RUNNER = CliRunner()
ALL = [words for examples in EXAMPLES.values() for words in examples]
# they need a GPU, a server that runs until Ctrl-C, accelerate and several ranks, or TRL
NOT_RUN = (
    *("bench flce rms", "view runs/001", "run --steps 2:3 -- accelerate launch train.py", "mcp"),
    # tests/cli/test_command_search.py runs such searches
    *("fit --gpu rtx4090 -- trl sft --config sft.yaml", "advise --gpu rtx4090 -- trl dpo --config dpo.yaml"),
)
SIMULATED = (
    "step --model llama3.2-1b --liger flce",
    "step --model tiny --memory-limit 70MiB -o runs/small",
    "fit --model tiny --seq 512 --memory-limit 120MiB",
    "sweep --model tiny --batch 1,2 --liger none,flce -o runs/tiny",
    "kernels check rms",
    "run -- python train.py",
)
TRAINER = {"model_name_or_path": "meta-llama/Llama-3.2-1B", "per_device_train_batch_size": 8, "bf16": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the examples name."""
    folder = tmp_path_factory.mktemp("examples")
    small, other = (RECORDINGS / f"small-{name}.pickle.xz" for name in ("lora", "own-all"))
    trace = DATA / "traces" / "llama3.2-1b-step.pt.trace.json.xz"
    for name, source in (("snapshot.pickle", small), ("before.pickle", small), ("after.pickle", other)):
        shutil.copy(source, folder / name)
    for name in ("step.pt.trace.json", "later.pt.trace.json"):
        shutil.copy(trace, folder / name)
    (folder / "train.py").write_text("print('trained')\n")
    (folder / "training_args.json").write_text(json.dumps(TRAINER))
    findings = (Finding(record=record, environment=ENVIRONMENT) for record in example_records())
    (folder / "bench.jsonl").write_text(write_lines(findings))
    first = folder / "runs" / "001"
    step = ["step", "--model", "tiny", "--batch", "1", "--seq", "64", "--device", "simulated"]
    assert RUNNER.invoke(main, [*step, "-o", str(first)]).exit_code == 0
    shutil.copytree(first, folder / "runs" / "002")
    shutil.copy(DATA / "live.json", first)
    result = json.loads((first / "result.json").read_text())
    (folder / "estimate.json").write_text(json.dumps(result["estimate"]))
    for name in ("sweep", "study"):
        (folder / "runs" / name).mkdir()
        (folder / "runs" / name / "results.jsonl").write_text(json.dumps(result) + "\n")
    return folder


@pytest.mark.parametrize("name", ["ligerprof", *COMMANDS])
def test_the_help_of_a_command_shows_its_examples_whole(name: str) -> None:
    arguments = [] if name == "ligerprof" else [name]
    result = RUNNER.invoke(main, [*arguments, "--help"], terminal_width=80)

    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert EXAMPLES[name]
    for words, text in EXAMPLES[name].items():
        assert max(len(words) + 12, len(text) + 6) <= 80
        assert lines[lines.index(f"  ligerprof {words}") + 1] == f"      {text}"
        assert text.endswith(".")


@pytest.mark.parametrize("words", ALL)
def test_an_example_is_a_valid_command_line(words: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    name, *arguments = shlex.split(words)
    command = main.get_command(click.Context(main), name)

    assert command is not None
    command.make_context(name, arguments)


@pytest.mark.parametrize("words", [words for words in ALL if words not in (*NOT_RUN, *SIMULATED)])
def test_an_example_runs(words: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    result = RUNNER.invoke(main, shlex.split(words))

    assert result.exit_code in (0, 3), result.output
    assert result.output


@pytest.mark.slow
@pytest.mark.parametrize("words", SIMULATED)
def test_a_simulated_example_runs(words: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    result = RUNNER.invoke(main, shlex.split(words))

    assert result.exit_code in (0, 3), result.output
