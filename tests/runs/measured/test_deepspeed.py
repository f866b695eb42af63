import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ligerprof.analyzers.estimate import estimate
from ligerprof.cli.main import main
from ligerprof.errors import LigerprofError
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.directory import create_run_directory
from tests.paths import RESULTS
from tests.sampling import sampled

DEEPSPEED = ("step", "--model", "tiny", "--batch", "2", "--seq", "64", "--engine", "deepspeed", "--precision", "mixed")
ROWS = [json.loads(line) for line in (RESULTS / "zero-h200.jsonl").read_text().splitlines()]
UNSPLIT_BYTES = 2**20
# docs/deepspeed.md quotes these
WITH_KERNELS_TOLERANCE, PLAIN_TOLERANCE = 0.0175, 0.0045


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), catch_exceptions=False)


def name_of(row: dict[str, Any]) -> str:
    return "-".join(str(row["recipe"][key]) for key in ("model", "gpus", "zero", "offload", "liger", "lora"))


@sampled("row", ROWS, ids=name_of, every=4)
def test_peak_on_several_gpus_is_the_estimated_one(row: dict[str, Any]) -> None:
    recipe = TrainingRecipe.from_json(row["recipe"])
    tolerance = WITH_KERNELS_TOLERANCE if recipe.kernels else PLAIN_TOLERANCE
    assert estimate(recipe).peak_bytes == pytest.approx(row["peak_bytes"], rel=tolerance)
    assert row["peak_bytes"] == max(rank["peak_bytes"] for rank in row["ranks"])
    assert len(row["ranks"]) == recipe.gpus


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_all_memory_under_deepspeed_is_attributed(row: dict[str, Any]) -> None:
    assert row["roles"]["unattributed"] == 0
    # roles are of the recorded step, where a block may have been split that was not in the measured one
    off_bytes = sum(row["roles"].values()) - row["peak_bytes"]
    assert abs(off_bytes) <= UNSPLIT_BYTES
    assert not off_bytes or any(f"{off_bytes:+d} bytes off" in note for note in row["notes"])


@pytest.mark.parametrize(
    ("options", "exit_code", "says"),
    [
        (
            ("--device", "simulated", "--zero", "3", "--offload", "nvme", "--nvme-path", "/tmp"),
            1,
            "does not cover --offload nvme",
        ),
        (("--device", "simulated", "--zero", "2"), 1, "pip install deepspeed"),
        (("--device", "cuda"), 1, "pip install deepspeed"),
        (("--device", "cuda", "--optimizer", "none"), 2, "needs an optimizer"),
        (("--device", "cuda", "--deepspeed-config", "nowhere.json"), 2, "no such file"),
    ],
)
def test_what_cannot_run_is_one_line_and_leaves_nothing(
    options: tuple[str, ...], exit_code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # None makes the import fail
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    result = run(*DEEPSPEED, *options, "-o", str(tmp_path / "run"))
    assert (result.exit_code, result.stdout) == (exit_code, "")
    assert says in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()


def test_every_rank_leaves_a_snapshot(tmp_path: Path) -> None:
    folder = create_run_directory(tmp_path / "run")
    folder.write_snapshot({"segments": []})
    folder.write_snapshot({"segments": [1]}, rank=1)
    assert sorted(path.name for path in folder.path.iterdir()) == ["snapshot-rank1.pickle", "snapshot.pickle"]


def step(*options: str) -> dict[str, Any]:
    """A step in a process of its own, as DeepSpeed wants it."""
    command = [sys.executable, "-m", "ligerprof", *DEEPSPEED, "--json", "--repeats", "1", "--no-trace", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 3), done.stderr
    # DeepSpeed's own output is elsewhere: this is one object and nothing else
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        ("--zero", "0"),
        ("--zero", "1"),
        ("--zero", "2", "--offload", "optimizer"),
        ("--zero", "3", "--liger", "all"),
        ("--zero", "3", "--offload", "all", "--liger", "all", "--grad-accum", "2"),
    ],
    ids=" ".join,
)
def test_a_measured_step_names_all_it_holds(options: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    result = step(*options, "-o", str(tmp_path / "run"))
    assert result["oom"] is None
    assert sum(result["roles"].values()) == result["peak_bytes"]
    assert result["roles"]["unattributed"] == 0
    assert (result["host_bytes"] is not None) == ("--offload" in options)
    # the bucket is as large as the whole of so small a model's step; what is left is a matter of MiBs
    if result["estimate"] is not None:
        assert abs(result["error_ratio"]) < 0.05


@pytest.mark.gpu
def test_a_users_configuration_runs(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"zero_optimization": {"reduce_bucket_size": 1e6}, "train_batch_size": "auto"}))
    result = step("--zero", "2", "--deepspeed-config", str(config), "-o", str(tmp_path / "run"))
    assert result["recipe"]["deepspeed_config"] == {"zero_optimization": {"reduce_bucket_size": 1_000_000}}
    assert result["roles"]["communication"] < 10_000_000
    config.write_text(json.dumps({"zero_optimization": {"no_such_key": 1}}))
    command = [sys.executable, "-m", "ligerprof", *DEEPSPEED, "--zero", "2", "--deepspeed-config", str(config)]
    refused = subprocess.run([*command, "-o", str(tmp_path / "no")], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "DeepSpeed refuses it" in refused.stderr.splitlines()[-1]


def test_a_lock_that_a_killed_build_left_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ligerprof.runs.measured import deepspeed as engine

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    engine._require_no_stale_lock()
    lock = tmp_path / "cpu_adam" / "lock"
    lock.touch()
    # somebody builds right now: torch waits for it
    engine._require_no_stale_lock()
    os.utime(lock, (0, 0))
    with pytest.raises(LigerprofError, match=r"cpu_adam/lock: .* Remove it"):
        engine._require_no_stale_lock()
