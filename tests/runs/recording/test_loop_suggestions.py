"""Loops of post-training that run out of memory on a simulated GPU: the first suggestion is about the mistake."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[3] / "benchmarks" / "unchanged_programs" / "own_loops.py"
MISTAKES = [
    ("growing-cache", 960, "kept-outputs"),
    ("logged-tensors", 3000, "kept-outputs"),
    ("scored-with-graph", 4480, "no-grad"),
    ("fp32-reference", 2800, "bf16-reference"),
]


def run(folder: Path, *words: str, limit_mib: int) -> tuple[int, dict[str, Any]]:
    ours = [sys.executable, "-m", "ligerprof", "run", "--json", "--device", "simulated", "-o", str(folder)]
    command = [*ours, "--memory-limit", f"{limit_mib}MiB", "--", sys.executable, str(PROGRAM), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout)["ranks"][0]


@pytest.mark.slow
@pytest.mark.parametrize(("mistake", "limit_mib", "first"), MISTAKES, ids=[mistake for mistake, _, _ in MISTAKES])
def test_a_loop_runs_with_its_first_suggestion(mistake: str, limit_mib: int, first: str, tmp_path: Path) -> None:
    code, rank = run(tmp_path / "failed", mistake, limit_mib=limit_mib)
    assert code == 3
    assert rank["suggestions"][0]["name"] == first
    assert rank["suggestions"][0]["lets_pass"]

    code, mended = run(tmp_path / "mended", mistake, "--change", first, limit_mib=limit_mib)
    assert code == 0

    if mistake == "fp32-reference":
        roles = {model["role"]: model for model in rank["models"]}
        assert roles.keys() == {"policy", "reference"}
        assert roles["policy"]["dtypes"].keys() == {"bfloat16"}
        assert roles["reference"]["dtypes"].keys() == {"float32"}
        assert roles["reference"]["parameters_bytes"] == 2 * roles["policy"]["parameters_bytes"]
        assert roles["reference"]["phases"] == ["scoring"]
    if mistake == "growing-cache":
        (policy,) = rank["models"]
        assert policy["role"] == "policy"
        assert {"forward", "generation"} <= set(policy["phases"])
        assert policy["kv_cache_bytes"] == rank["roles"]["kv_cache"] > 0
        # keys and values of 4 layers with 4 heads of 64
        assert mended["engine"]["kv_token_bytes"] == 2 * 4 * 4 * 64 * 2
        assert 0 < mended["engine"]["awake"]["kv_tokens"] < mended["engine"]["asleep"]["kv_tokens"]
        assert rank["engine"] is None
