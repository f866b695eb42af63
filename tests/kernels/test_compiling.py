"""Kernels compile for GPUs that need not be present, with wide loads, also for odd vocabularies."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.compiling import CASES, NORM_CASES, WAITING
from tests.kernels.test_memory import ALL_KERNELS
from tests.paths import REPOSITORY

# the limit of one program, of 228 KiB
_SHARED_BYTES = 227 * 1024
# per thread, for 16-bit rows that are too long for registers in fp32
_SPILLED_BYTES = {("add_rms", "_norm_bwd_kernel"): 8, ("layernorm", "_norm_bwd_kernel"): 112}


def compiled_for_hopper(cases: tuple[str, ...], cache: Path) -> list[dict[str, Any]]:
    """The launches, compiled in a separate process: this one interprets kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiling", "90", *cases],
        cwd=REPOSITORY,
        env={**environment, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


# the longest rows in 16 bits
QUICK = ("llama-1b", "norm-16384-16", WAITING)


@pytest.fixture(
    scope="module",
    params=[QUICK, pytest.param((*CASES, *NORM_CASES, WAITING), marks=pytest.mark.slow)],
    ids=["quick", "all"],
)
def launches(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return compiled_for_hopper(request.param, tmp_path_factory.mktemp("cache"))


def test_every_launch_compiles_for_hopper_and_streams_in_wide_loads(launches: list[dict[str, Any]]) -> None:
    launches = [launch for launch in launches if launch["case"] in CASES]
    # forward of a gated kernel with the linear layer launches the same kernel as without it
    assert {launch["slot"] for launch in launches} == set(ALL_KERNELS)
    narrow = {(launch["slot"], launch["kernel"], launch["case"]) for launch in launches if launch["wide_loads"] == 0}
    # rows of given logits of an odd vocabulary are not aligned; labels and losses are few
    assert narrow <= {
        ("ce", "_cross_entropy_kernel", "gpt2-xl"),
        ("ce", "_cross_entropy_kernel", "gpt2-xl-fp32"),
        ("ce", "_reciprocal_count_kernel", "llama-1b"),
        ("ce", "_total_kernel", "llama-1b"),
    }


def test_norms_fit_shared_memory_and_spill_little(launches: list[dict[str, Any]]) -> None:
    launches = [launch for launch in launches if launch["case"] in NORM_CASES]
    assert max(launch["shared_bytes"] for launch in launches) <= _SHARED_BYTES
    if any(launch["stack_bytes"] is None for launch in launches):
        pytest.skip("Triton has no cuobjdump")
    # code that two widths share is listed once, under the first
    for launch in launches:
        long = launch["case"] in ("norm-12288-16", "norm-16384-16")
        spilled = _SPILLED_BYTES.get((launch["slot"], launch["kernel"]), 0) if long else 0
        # 32-bit rows of this length are rare and may spill
        assert launch["stack_bytes"] <= spilled or launch["case"] in ("norm-12288-32", "norm-16384-32"), launch


def test_rows_that_wait_for_their_turn_have_wide_loads_and_no_spills(launches: list[dict[str, Any]]) -> None:
    launches = [launch for launch in launches if launch["case"] == WAITING]
    assert [launch["kernel"] for launch in launches] == ["_cross_entropy_kernel", "_split_row_kernel"]
    for launch in launches:
        assert launch["wide_loads"] > 0
        assert launch["stack_bytes"] in (None, 0)
