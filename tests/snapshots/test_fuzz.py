"""Damaged files give a report or one error, in bounded time and memory: held in a child process."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tests.snapshots.programs import random_program

CHILD = """
import pathlib, random, resource, sys, time
from ligerprof.analyzers.explain import explain
from ligerprof.errors import LigerprofError
whole = pathlib.Path(sys.argv[1]).read_bytes()
path = pathlib.Path(sys.argv[1] + ".damaged")
explain(sys.argv[1])
unharmed = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
draw, slowest, errors = random.Random(7), 0.0, 0
for _ in range(int(sys.argv[2])):
    damaged = bytearray(whole)
    for _ in range(draw.choice([1, 1, 2, 8])):
        at, kind = draw.randrange(len(damaged)), draw.random()
        if kind < 0.7:
            damaged[at] = draw.randrange(256)
        elif kind < 0.85:
            del damaged[at : at + draw.randrange(1, 40)]
        else:
            damaged[at:at] = damaged[at : at + draw.randrange(1, 400)]
    path.write_bytes(damaged)
    started = time.perf_counter()
    try:
        report = explain(path)
        assert report.roles.total_bytes == report.peak_bytes
        report.to_json()
    except LigerprofError as error:
        errors += 1
        assert "\\n" not in str(error)
    slowest = max(slowest, time.perf_counter() - started)
assert errors
assert slowest < 5, slowest
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss <= 2 * unharmed + 64 * 1024
"""


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.slow)])
def test_damaged_files_are_a_report_or_one_error_within_bounds(count: int, tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(random_program(5, events=60).snapshot()))

    finished = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), str(count)], capture_output=True, text=True, check=False
    )

    assert finished.returncode == 0, finished.stderr
