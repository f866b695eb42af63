import gzip
import json
import lzma
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ligerprof.analyzers.trace.times import GapCause, HostLayer, KernelClass
from ligerprof.cli.main import main
from tests.analyzers.trace.entries import RECORDING, call, kernel, operator, step, write
from tests.analyzers.trace.test_kernel_classes import KNOWN
from tests.golden import assert_matches_golden

GOLDEN = Path(__file__).parent / "golden"


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["trace", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def read_json(*arguments: object) -> dict[str, Any]:
    code, stdout, stderr = run(*arguments, "--json")
    assert (code, stderr) == (0, "")
    values: dict[str, Any] = json.loads(stdout)
    return values


@pytest.fixture
def fused(tmp_path: Path) -> Path:
    return write(
        tmp_path / "fused.json",
        step(0, 1000),
        operator(1, 90, "aten::mm", **{"External id": 1}),
        call(10, 5, 1),
        kernel(20, 600, "nvjet_h", correlation=1, **{"External id": 1}),
        call(700, 5, 2),
        kernel(710, 100, "_rms_fwd_kernel", correlation=2),
    )


def test_json_has_the_busy_share_and_every_word() -> None:
    values = read_json(RECORDING, "--top", 3)

    assert (values["schema"], values["kind"], values["steps"]) == (1, "trace", ["ProfilerStep#2"])
    assert values["gpu_busy_share"] == pytest.approx(0.6548, abs=5e-5)
    assert list(values["classes"]) == [kind.value for kind in KernelClass]
    assert list(values["host"]) == [layer.value for layer in HostLayer]
    assert len(values["top_kernels"]) == 3
    assert values["top_kernels"][0]["operator"] == "aten::mm"
    (device,) = values["devices"]
    assert {gap["cause"] for gap in device["gaps"]} <= {cause.value for cause in GapCause}
    idle = sum(gap["seconds"] for gap in device["gaps"])
    assert device["occupied_seconds"] + idle == pytest.approx(values["window_seconds"], abs=5e-8)


def test_printed_report_is_the_golden_one() -> None:
    code, stdout, stderr = run(RECORDING, "--top", 12)

    assert (code, stderr) == (0, "")
    assert max(map(len, stdout.splitlines())) <= 100
    assert_matches_golden(stdout, GOLDEN / "trace.txt")


def test_every_class_and_layer_fits_on_a_line(tmp_path: Path) -> None:
    names = [name for name, _ in KNOWN] * 2
    kernels = [kernel(index * 1_000_000, 999_999, name) for index, name in enumerate(names)]
    path = write(tmp_path / "long.json", step(0, len(names) * 1_000_000), call(5, 1, 1), *kernels)

    code, stdout, _ = run(path)

    assert code == 0
    assert max(map(len, stdout.splitlines())) <= 100
    for kind in KernelClass:
        assert kind in stdout
        assert kind.meaning in stdout
    cut = [line for line in stdout.splitlines() if "…" in line]
    # only kernel names are shortened
    assert all(line.split("…")[0].strip() in " ".join(names) for line in cut)


def test_two_traces_are_printed_side_by_side(fused: Path) -> None:
    code, stdout, stderr = run(RECORDING, fused)

    assert (code, stderr) == (0, "")
    assert max(map(len, stdout.splitlines())) <= 100
    assert_matches_golden(stdout, GOLDEN / "trace_pair.txt")


def test_differences_are_second_less_first(fused: Path) -> None:
    values = read_json(RECORDING, fused)

    assert values["kind"] == "trace"
    first, second = values["traces"]
    difference = values["difference"]
    assert difference["window_seconds"] == pytest.approx(0.001 - first["window_seconds"])
    assert difference["kernels"] == 2 - 2558
    assert difference["gpu_busy_share"] == pytest.approx(0.7 - first["gpu_busy_share"])
    for kind in KernelClass:
        change = second["classes"][kind.value]["seconds"] - first["classes"][kind.value]["seconds"]
        assert difference["classes"][kind.value] == pytest.approx(change, abs=1e-9)
    assert difference["classes"]["fused"] == pytest.approx(100e-6)
    # the second has no spans of autograd or an optimizer
    assert difference["phases"] is None


def test_changes_of_all_kernels_sum_to_the_change_of_the_classes(fused: Path) -> None:
    values = read_json(RECORDING, fused, "--top", 10_000)
    changes = values["difference"]["kernels_by_change"]
    assert sum(change["difference_seconds"] for change in changes) == pytest.approx(
        sum(values["difference"]["classes"].values()), abs=1e-7
    )
    sizes = [abs(change["difference_seconds"]) for change in changes]
    assert sizes == sorted(sizes, reverse=True)


def test_the_newest_trace_of_a_run_is_used(tmp_path: Path, fused: Path) -> None:
    folder = tmp_path / "run" / "tensorboard"
    folder.mkdir(parents=True)
    newest = folder / "host_1.2.pt.trace.json.gz"
    newest.write_bytes(gzip.compress(fused.read_bytes()))
    older = folder / "host_1.1.pt.trace.json"
    older.write_bytes(lzma.decompress(RECORDING.read_bytes()))
    os.utime(older, (1, 1))

    for source in (folder.parent, folder):
        values = read_json(source)
        assert (values["source"], values["kernels"]) == (str(newest), 2)


def test_packed_and_plain_files_read_the_same(tmp_path: Path, fused: Path) -> None:
    packed = tmp_path / "packed.json.gz"
    packed.write_bytes(gzip.compress(fused.read_bytes()))
    plain, unpacked = read_json(fused), read_json(packed)
    assert {**plain, "source": ""} == {**unpacked, "source": ""}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "this is empty"),
        (b'{"traceEvents": [{"ph": "X", ', "Was the file truncated?"),
        (b"\x80\x04\x95", "not a trace: it begins with"),
        (b'{"segments": []}', "no 'traceEvents' key"),
        (b'{"traceEvents": []}', "contains no GPU work"),
    ],
    ids=["empty", "cut", "pickle", "other", "no events"],
)
def test_a_file_that_is_not_a_trace_is_one_line(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "strange.json"
    path.write_bytes(content)

    code, stdout, stderr = run(path)

    assert (code, stdout, stderr.count("\n")) == (1, "", 1)
    assert "strange.json" in stderr
    assert says in stderr


def test_a_folder_without_a_trace_is_one_line(tmp_path: Path) -> None:
    code, stdout, stderr = run(tmp_path)
    assert (code, stdout, stderr.count("\n")) == (1, "", 1)
    assert "it holds no profiler trace (*.pt.trace.json*)" in stderr


def test_usage_errors_end_in_2(tmp_path: Path) -> None:
    assert run()[0] == 2
    assert run(tmp_path / "absent.json")[0] == 2
    assert run(RECORDING, RECORDING, RECORDING)[0] == 2
