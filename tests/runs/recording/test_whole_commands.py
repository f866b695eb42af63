"""Commands whose processes pretend to use a CUDA device, from the door to the report."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[3]
TRAINING = """
import os, sys
from tests.runs.recording.fake_cuda import initialize, train
how = sys.argv[1]
initialize(fails_at=40 if how == "oom" else None)
if how == "exit":
    child = os.fork()
    if child == 0:
        train(1)
        os._exit(0)
    os.waitpid(child, 0)
sys.stdout.buffer.write(b"\\xff\\n")
train(2)
if how == "exit":
    os._exit(5)
"""


def run(folder: Path, how: str) -> tuple[subprocess.CompletedProcess[bytes], dict[str, Any]]:
    script = folder / "train.py"
    script.write_text(TRAINING)
    command = [sys.executable, "-m", "ligerprof", "run", "-o", str(folder / "out"), "--", "python", str(script), how]
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    return done, json.loads((folder / "out" / "result.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(("how", "exit_code"), [("exit", 5), ("oom", 3)])
def test_a_script_is_recorded_however_it_ends(how: str, exit_code: int, tmp_path: Path) -> None:
    done, result = run(tmp_path, how)

    assert (done.returncode, done.stdout) == (exit_code, b"\xff\n")
    (rank,) = result["ranks"]
    assert rank["steps"] == (1 if how == "oom" else 2)
    expected = ["forward", "backward"] if how == "oom" else ["forward", "backward", "optimizer", "evaluation", "saving"]
    assert list(rank["phases"]) == expected
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "recording.json",
        "result.json",
        "snapshot.pickle",
    ]
    assert b"Peak 1.0 MiB" in done.stderr
