"""Damaged files of every kind give an answer or one error, in bounded time and memory."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.fuzzing import run as fuzzing
from tests.fuzzing.subjects import Subject, by_command, by_function
from tests.paths import REPOSITORY


@pytest.mark.parametrize("count", [60, pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_damaged_files_of_every_kind_are_answered_or_refused(count: int, tmp_path: Path) -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "tests.fuzzing.run", str(tmp_path), str(count)],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
    )

    assert finished.returncode == 0, (finished.stdout, finished.stderr[-5000:], list(tmp_path.iterdir()))
    table = [json.loads(line) for line in finished.stdout.splitlines()]
    assert {row["kind"] for row in table} == set(fuzzing.SHARES)
    assert sum(row["inputs"] for row in table) == count
    assert sum(row[end] for row in table for end in fuzzing.FAILURES) == 0
    print(finished.stdout)


def careless(path: Path) -> object:
    """Read a file as nobody should."""
    content = json.loads(path.read_bytes())
    return content["a"]["b"] + 1


def test_a_careless_reader_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"a": {"b": 1}}
    subject = Subject(
        kind="result", suffix=".json", content=json.dumps(values).encode(), values=values, read=by_function(careless)
    )
    monkeypatch.setattr(fuzzing, "subjects", lambda: [subject])

    ends: Counter[str] = fuzzing.run("result", 20, tmp_path)

    assert ends["traceback"] > 0
    assert sorted(tmp_path.glob("*.reason"))


def test_what_reaches_the_terminal_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("{}", encoding="utf-8")
    subject = Subject(kind="result", suffix=".json", content=b"{}", read=by_command("compare", twice=True))
    assert fuzzing.outcome(subject, path) == ("refused", "")
