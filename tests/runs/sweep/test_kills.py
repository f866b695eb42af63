import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest


def is_row(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kills processes")
def test_a_sweep_killed_at_any_moment_loses_and_repeats_no_row(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.runs.sweep.killed", str(tmp_path)], capture_output=True, text=True, check=True
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]

    kept = [sum(map(is_row, one["rows"][0].split("\n"))) for one in found]
    assert set(kept) == {0, 1, 2, 3}, "killed before the first row, between any two, and after the last"
    assert any(not one["rows"][0].endswith("\n") for one in found if one["rows"][0]), "killed inside a row"
    for one, count in zip(found, kept, strict=True):
        before, after = one["rows"]
        assert one["ended_by"] == [signal.SIGKILL, 0], one["moment"]
        rows = [json.loads(line) for line in after.splitlines()]
        assert [row["key"] for row in rows] == one["keys"], one["moment"]
        assert after.splitlines()[:count] == before.splitlines()[:count], one["moment"]
        # only cells without a whole row run again
        assert one["ran"][1] == one["keys"][count:], one["moment"]
