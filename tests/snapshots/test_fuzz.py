"""Damaged files give a report or one error in bounded time and memory, and the same events as pickle."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import REPOSITORY


@pytest.mark.parametrize("kind", ["bytes", "values"])
@pytest.mark.parametrize("count", [120, pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_damaged_files_give_a_report_or_one_error_within_bounds(kind: str, count: int, tmp_path: Path) -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "tests.snapshots.fuzzing", str(tmp_path), kind, str(count)],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
    )

    assert finished.returncode == 0, (finished.stderr[-5000:], list(tmp_path.iterdir()))
    print(finished.stdout)
