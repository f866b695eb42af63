"""Launchers with one process on a simulated GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import REPOSITORY

PROGRAM = """
import os, sys

assert "torch" in sys.modules, "not forked"
assert __name__ == "__main__" and sys.argv == [__file__, "--rate", "1"], sys.argv
assert os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"
import torch

assert torch.get_num_threads() == 1 and not torch.cuda.is_initialized()
weight = torch.nn.Parameter(torch.zeros(1 << 20, device="cuda"))
optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
for _ in range(2):
    weight.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
sys.exit(5)
"""


@pytest.mark.slow
def test_accelerate_launch_forks_the_process_of_its_program(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    accelerate = str(Path(sys.executable).with_name("accelerate"))
    launcher = [accelerate, "launch", "--num_processes=1", "--mixed_precision=bf16", "--quiet"]
    ours = [sys.executable, "-m", "ligerprof", "run", "--device", "simulated", "--json", "-o", str(tmp_path / "run")]
    done = subprocess.run(
        [*ours, "--", *launcher, str(script), "--rate", "1"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    # accelerate ends with 1 however its program failed
    assert done.returncode == 1, done.stderr
    (rank,) = json.loads(done.stdout)["ranks"]
    assert rank["steps"] == 2
    assert rank["peak_bytes"] >= 12 << 20
