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
from tests.paths import DATA, RECORDINGS, REPOSITORY
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
