import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from ligerprof.cli.main import main
from ligerprof.roles import Role
from tests.golden import assert_matches_golden
from tests.paths import RECORDINGS
from tests.torch_memory.allocator.programs import random_program

RECORDING = str(RECORDINGS / "hf-4.45-ckpt-4x1024.pickle.xz")
GOLDEN = Path(__file__).parent / "golden"


def test_json_has_the_keys_of_the_contract() -> None:
    result = CliRunner().invoke(main, ["explain", RECORDING, "--json"])

    report = json.loads(result.stdout)
    assert result.exit_code == 0
    assert result.stderr == ""
    assert (report["schema"], report["kind"], report["device"], report["complete"]) == (1, "peak", 0, True)
    assert report["peak_bytes"] == 14120016896
    assert report["reserved_bytes"] == 17844666368
    assert list(report["roles"]) == [role.value for role in Role]
    assert sum(report["roles"].values()) == report["peak_bytes"]
    assert {"role", "bytes", "count", "module", "frame"} <= set(report["blocks"][0])
    assert report["notes"] == []


@pytest.mark.parametrize("by", ["role", "phase", "layer"])
def test_printed_report_is_the_golden_one(by: str) -> None:
    result = CliRunner().invoke(main, ["explain", RECORDING, "--by", by, "--top", "6"])

    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 100
    assert_matches_golden(result.stdout, GOLDEN / f"explain_by_{by}.txt")


@pytest.mark.parametrize("name", ["oom-leak", "oom-caught"])
def test_a_failure_is_printed_first(name: str) -> None:
    result = CliRunner().invoke(main, ["explain", str(RECORDINGS / f"{name}.pickle.xz"), "--top", "6"])

    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert all("out of memory" in line.lower() for line in lines[:2])
    assert max(map(len, lines)) <= 100
    assert_matches_golden(result.stdout, GOLDEN / f"explain_{name}.txt")


def test_json_of_a_failure_has_the_keys_of_the_contract() -> None:
    result = CliRunner().invoke(main, ["explain", str(RECORDINGS / "oom-leak.pickle.xz"), "--json"])

    report = json.loads(result.stdout)
    oom = report["oom"]
    assert result.exit_code == 0
    assert sum(report["roles"].values()) == report["peak_bytes"] == 3883703808
    assert list(oom["roles"]) == [role.value for role in Role]
    assert sum(oom["roles"].values()) == oom["allocated_bytes"] == 3752631808
    rounding = oom["roles"]["allocator_rounding"]
    assert sum(block["bytes"] for block in oom["blocks"]) == oom["allocated_bytes"] - rounding
    assert sum(free["bytes"] for free in oom["free"]) == oom["reserved_bytes"] - oom["allocated_bytes"]
    assert (oom["requested_bytes"], oom["phase"], oom["step"], oom["caught"]) == (262144000, "backward", 16, False)
    assert (oom["why"], oom["needed_bytes"]) == ("limit", 262144000)
    assert oom["growth"][0]["frame"] == "modeling_llama.py:480 forward"
    assert report["growth"] == oom["growth"][0]


def test_suggestions_are_lines_of_the_file_that_the_training_was_started_with(tmp_path: Path) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text(
        "base_model: tiny\nmicro_batch_size: 4  # per GPU\nsequence_len: 1024\noptimizer: adamw_torch_fused\n"
    )

    result = CliRunner().invoke(main, ["explain", RECORDING, "--config", str(file), "--json"])

    (halved,) = [each for each in json.loads(result.stdout)["suggestions"] if each["name"] == "half-batch"]
    assert halved["how"][0] == f"In {file}:"
    assert halved["how"][1:3] == ["- micro_batch_size: 4", "+ micro_batch_size: 2"]


def test_a_copy_of_the_file_has_the_first_suggestion_that_it_has_keys_for(tmp_path: Path) -> None:
    file, copy = tmp_path / "sft.yaml", tmp_path / "fixed.yaml"
    file.write_text("base_model: tiny\nmicro_batch_size: 4  # per GPU\nsequence_len: 1024\n")
    arguments = ["explain", RECORDING, "--config", str(file), "-o", str(copy)]

    result = CliRunner().invoke(main, [*arguments, "--json"])

    assert f"wrote {copy}" in result.stderr
    lines = [
        line.partition(" ")[2]
        for each in json.loads(result.stdout)["suggestions"]
        if each["how"][0] == f"In {file}:"
        for line in each["how"]
        if line.startswith("+ ")
    ]
    written = [line for line in copy.read_text().splitlines() if line not in file.read_text().splitlines()]
    assert written
    assert yaml.safe_load("\n".join(written)).items() <= yaml.safe_load("\n".join(lines)).items()
    assert "exists. Add --force" in CliRunner().invoke(main, arguments).stderr
    without_file = CliRunner().invoke(main, ["explain", RECORDING, "-o", str(tmp_path / "other.yaml")])
    assert "A changed copy needs a --config file" in without_file.stderr


def test_peak_over_the_limit_prints_the_report_and_ends_in_3() -> None:
    over = CliRunner().invoke(main, ["explain", RECORDING, "--max-peak", "13GiB", "--json"])
    under = CliRunner().invoke(main, ["explain", RECORDING, "--max-peak", "13.2GiB", "--json"])

    assert over.exit_code == 3
    assert json.loads(over.stdout)["peak_bytes"] == 14120016896
    assert over.stderr == "Error: the peak of 13.15 GiB is over --max-peak 13.00 GiB.\n"
    assert (under.exit_code, under.stderr) == (0, "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["missing.pickle"],
        [RECORDING, "--max-peak", "lots"],
        [RECORDING, "--by", "colour"],
        [RECORDING, "--top", "0"],
        [],
    ],
)
def test_wrong_usage_ends_in_2(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, ["explain", *arguments])

    assert result.exit_code == 2
    assert result.stdout == ""


def test_hostile_file_is_one_line_and_ends_in_1(tmp_path: Path) -> None:
    canary, path = tmp_path / "canary", tmp_path / "snapshot.pickle"

    class Touch:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (canary,))

    path.write_bytes(pickle.dumps(Touch()))

    result = CliRunner().invoke(main, ["explain", str(path)])

    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {path}: refusing pickle opcode")
    assert result.stderr.count("\n") == 1
    assert not canary.exists()


def test_device_that_is_not_there_ends_in_1() -> None:
    result = CliRunner().invoke(main, ["explain", RECORDING, "--device-index", "3"])

    assert result.exit_code == 1
    assert "has no device 3" in result.stderr


def test_explain_never_imports_torch(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(random_program(1).snapshot()))
    code = (
        "import sys; from ligerprof.cli.main import main\n"
        f"main(['explain', {str(path)!r}], standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules or 'matplotlib' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
