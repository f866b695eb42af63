"""Hostile files on the command line: a report or one line of error, and nothing that a terminal would obey."""

import io
import json
import lzma
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ligerprof.cli.main import main
from ligerprof.models.names import CONFIGS
from tests.paths import DATA, RECORDINGS, REPOSITORY, RESULTS
from tests.torch_memory.allocator.programs import random_program

FILES = sorted(path for path in (DATA / "hostile").iterdir() if path.suffix != ".md")
# an escape sequence, C1, bidi, markup, a line break, a lone surrogate, NUL
NAMES = (
    "\x1b]0;owned\x07",
    "\x9b31m",
    "\u202eedoc",
    "[red]x[/]",
    "[link=http://x]y[/link]",
    "[/]",
    "a\nb",
    "\ud800",
    "\0",
    ":bomb:",
)
RECORDING = str(RECORDINGS / "small-late.pickle.xz")


def run(*arguments: str, **options: Any) -> Result:
    result = CliRunner().invoke(main, arguments, **options)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result


def assert_calm(result: Result) -> None:
    """Whether a command ended in a report, or in one line of error; nothing in its output is special to a terminal."""
    assert result.exit_code in (0, 1)
    for line in result.output.split("\n"):
        assert line.isprintable()
    assert len(result.stderr.splitlines()) == result.exit_code


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_each_file_gives_a_report_or_one_error(path: Path) -> None:
    if path.suffix == ".json":
        assert_calm(run("trace", str(path)))
        return
    assert_calm(run("explain", str(path), "--top", "100"))
    assert_calm(run("diff", str(path), str(path)))
    assert_calm(run("compare", str(path), str(path)))


@pytest.mark.parametrize("name", NAMES)
def test_names_from_a_file_are_printed_escaped(name: str, tmp_path: Path) -> None:
    values = random_program(3, events=80).snapshot()
    frames = [{"filename": f"{name}.py", "line": 3, "name": name}, {"filename": "x.py", "line": 1, "name": "<module>"}]
    for event in values["device_traces"][0]:
        event.update(frames=frames, user_metadata=f"ligerprof;1;forward;{name};{name}")
    for block in (block for segment in values["segments"] for block in segment["blocks"]):
        block["frames"] = frames
    values["external_annotations"] = [
        {"stage": stage, "name": name, "device": 0, "time_us": 5} for stage in ("START", "END")
    ]
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(values))

    report = run("explain", str(path), "--by", "layer", "--top", "100")
    assert_calm(report)
    assert name.encode("unicode_escape").decode() in report.stdout
    assert_calm(run("diff", str(path), RECORDING, "--top", "100"))
    assert_calm(run("diff", str(path), str(path), "--top", "100"))
    json.loads(run("explain", str(path), "--json").stdout)


def test_a_line_break_in_a_file_s_name_stays_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a\nError: all is well\x1b[2J.pickle"
    path.write_bytes(b"nonsense")
    for command in ("explain", "compare", "trace"):
        result = run(command, *[str(path)] * (1 + (command == "compare")))
        assert_calm(result)
        assert r"a\nError: all is well\x1b[2J.pickle: " in result.stderr


@pytest.mark.parametrize("command", ["explain", "trace"])
def test_standard_input_is_read(command: str) -> None:
    source = RECORDINGS / "compiled.pickle.xz"
    if command == "trace":
        source = DATA / "traces" / "llama3.2-1b-step.pt.trace.json.xz"
    from_file = run(command, str(source), "--json")
    for content in (source.read_bytes(), lzma.decompress(source.read_bytes())):
        piped = run(command, "-", "--json", input=io.BytesIO(content))
        assert piped.exit_code == 0
        assert piped.stdout.replace("standard input", "-") == from_file.stdout.replace(str(source), "-")


def test_standard_input_of_json_is_compared(tmp_path: Path) -> None:
    report = run("explain", RECORDING, "--json").stdout
    path = tmp_path / "peak.json"
    path.write_text(report, encoding="utf-8")
    assert run("compare", "-", str(path), input=report).exit_code == 0


@pytest.mark.parametrize("arguments", [("models",), ("models", "--json")])
@pytest.mark.parametrize("redirection", [">/dev/full", ">&-"])
def test_a_full_or_closed_output_is_one_line(arguments: tuple[str, ...], redirection: str) -> None:
    command = f"'{sys.executable}' -m ligerprof {' '.join(arguments)} {redirection}"
    finished = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert finished.returncode == 1
    assert finished.stderr.startswith("Error: standard output")
    assert finished.stderr.count("\n") == 1


def test_a_closed_pipe_is_read_from_a_real_process() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "ligerprof", "explain", "-"],
        input=b"",
        capture_output=True,
        check=False,
        cwd=REPOSITORY,
    )
    assert finished.returncode == 1
    assert finished.stderr.decode().startswith("Error: standard input: not a pickle")


CONFIG = CONFIGS["tiny"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("fit", "--model", "tiny", "--batch", "1e30"), "'1e30' is not a whole number"),
        (("estimate", "--model", "tiny", "--batch", "9" * 5000), "--batch"),
        (("estimate", "--model", "tiny", "--alloc-conf", f"max_split_size_mb:{'9' * 5000}"), "--alloc-conf"),
    ],
    ids=["float", "digits", "digits of a setting"],
)
def test_numbers_of_any_length_on_the_command_line_are_a_usage_error(arguments: tuple[str, ...], says: str) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({**CONFIG, "num_hidden_layers": 10**5}, "more than 4096"),
        (
            {**CONFIG, "num_attention_heads": 2 * CONFIG["hidden_size"], "num_key_value_heads": 1, "head_dim": None},
            "heads",
        ),
        ({**CONFIG, "vocab_size": 10**4000}, "an integer of"),
    ],
    ids=["layers", "heads", "digits"],
)
def test_models_of_impossible_sizes_are_refused_by_name(values: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    result = run("estimate", "--model", str(path))
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert says in result.stderr


@pytest.mark.parametrize("bucket", ["NaN", "Infinity", "1e400", "-1", "true", "9" * 400])
def test_buckets_that_are_not_sizes_are_refused(bucket: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(f'{{"zero_optimization": {{"stage": 3, "reduce_bucket_size": {bucket}}}}}', encoding="utf-8")
    arguments = ("--model", "tiny", "--engine", "deepspeed", "--zero", "3", "--precision", "mixed-fp16")
    result = run("estimate", *arguments, "--deepspeed-config", str(path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "reduce_bucket_size" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", ["num_hidden_layers", "batch"])
def test_a_row_of_an_impossible_size_stops_no_sweep_for_long(name: str, tmp_path: Path) -> None:
    row = json.loads((RESULTS / "steps-h200.jsonl").read_text(encoding="utf-8").splitlines()[0])
    changed = row["recipe"]["model_config"] if name in row["recipe"]["model_config"] else row["recipe"]
    changed[name] = 10**5 if name == "num_hidden_layers" else 10**400
    (tmp_path / "results.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    result = run("sweep", "--model", "tiny", "--dry-run", "-o", str(tmp_path))
    assert result.exit_code in (0, 1)
    assert result.exit_code == 0 or result.stderr.count("\n") == 1


def test_json_of_500_levels_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text('{"schema": 1, "kind": "peak", "roles": ' + "[" * 500 + "]" * 500 + "}", encoding="utf-8")
    for command in ("compare", "diff"):
        assert_calm(run(command, str(path), str(path)))
