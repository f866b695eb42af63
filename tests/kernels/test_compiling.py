"""Kernels compile for GPUs that are not here, with wide loads, also where a vocabulary is odd."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.compiling import CASES
from tests.kernels.test_memory import ALL_KERNELS

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    "cases", [("llama-1b", "gpt2-xl"), pytest.param(tuple(CASES), marks=pytest.mark.slow)], ids=["two", "all"]
)
def test_every_launch_compiles_for_hopper_and_streams_in_wide_loads(cases: tuple[str, ...], tmp_path: Path) -> None:
    """In a process of its own: in this one kernels are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiling", "90", *cases],
        cwd=ROOT,
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    launches = [json.loads(line) for line in done.stdout.splitlines()]
    # a gated kernel with the linear layer behind it launches what the one without does, backward apart
    assert {launch["slot"] for launch in launches} == set(ALL_KERNELS)
    narrow = {(launch["slot"], launch["kernel"], launch["case"]) for launch in launches if launch["wide_loads"] == 0}
    # rows of given logits of an odd vocabulary are not aligned; labels and losses are few
    assert narrow <= {
        ("ce", "cross_entropy_kernel", "gpt2-xl"),
        ("ce", "cross_entropy_kernel", "gpt2-xl-fp32"),
        ("ce", "_reciprocal_count_kernel", "llama-1b"),
        ("ce", "_total_kernel", "llama-1b"),
    }
