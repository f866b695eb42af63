import csv
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from ligerprof.cli.bench import FIGURE, RECORDS, TABLE
from ligerprof.cli.main import main
from ligerprof.runs.bench.operations import OPERATIONS
from ligerprof.runs.bench.records import (
    Direction,
    ErrorRecord,
    Finding,
    HostRecord,
    MissingRecord,
    Record,
    Subject,
    TimeRecord,
    find_shapes,
    write_lines,
)
from tests.golden import assert_matches_golden

RUNNER = CliRunner()
GOLDEN = Path(__file__).parent / "golden"
ENVIRONMENT = {"gpu": "NVIDIA H200", "date": "2026-11-20T10:00:00+00:00", "torch": "2.11.0", "liger-kernel": "0.8.5"}


def subject(kernel: str, provider: str, shape: str) -> Subject:
    (found,) = find_shapes(kernel, shape)
    return OPERATIONS[kernel].subject(provider, found, "bf16")


def timing(kernel: str, provider: str, shape: str, seconds: float, direction: Direction) -> TimeRecord:
    floored = kernel != "flce" or direction is Direction.FULL
    return TimeRecord(
        subject=subject(kernel, provider, shape),
        direction=direction,
        median_seconds=seconds,
        low_seconds=0.98 * seconds,
        high_seconds=1.05 * seconds,
        repetitions=10,
        floor="products" if kernel == "flce" else "copy",
        floor_seconds=0.9 * 0.010 if floored else None,
        floor_share=0.9 * 0.010 / seconds if floored else None,
        extra_peak_bytes=550 * 2**20,
    )


def example_records() -> Iterator[Record]:
    for provider, seconds in (("ligerprof", 0.0105), ("ligerprof:lean", 0.016), ("liger", 0.024)):
        for direction in (Direction.FORWARD, Direction.FULL):
            yield timing("flce", provider, "A", seconds, direction)
        for tensor, error in (("loss", 1e-4), ("d_hidden", 1.2e-2)):
            yield ErrorRecord(
                subject=subject("flce", provider, "A"),
                regime="std 5",
                tensor=tensor,
                error=error,
                eager_error=1e-2 if tensor == "d_hidden" else 0.0,
                ratio=1.2 if tensor == "d_hidden" else None,
                chunks=None if provider == "liger" else 4,
            )
        yield HostRecord(
            subject=subject("flce", provider, "A"),
            host_seconds=2.5e-4,
            synchronizations=3 if provider == "liger" else 0,
        )
    for shape in ("V=40960", "V=81920"):
        for provider, factor in (("ligerprof", 1.0), ("torch", 3.0)):
            yield timing("ce", provider, shape, 0.001 * factor * (1 + (shape == "V=81920")), Direction.FULL)
    for shape in "AB":
        yield MissingRecord(subject=subject("flce", "cce", shape), reason="No module named 'cut_cross_entropy'")


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    path = tmp_path / "earlier.jsonl"
    path.write_text(write_lines(Finding(record=record, environment=ENVIRONMENT) for record in example_records()))
    return path


def test_what_is_printed(earlier: Path) -> None:
    result = RUNNER.invoke(main, ["bench", "--from", str(earlier)])
    assert (result.exit_code, result.stderr) == (0, "")
    assert_matches_golden(result.stdout, GOLDEN / "bench.txt")


def test_json_is_one_object_of_flat_records(earlier: Path) -> None:
    result = RUNNER.invoke(main, ["bench", "--from", str(earlier), "--json"])
    printed = json.loads(result.stdout)
    assert (printed["schema"], printed["kind"]) == (1, "bench")
    assert printed["records"] == [json.loads(line) for line in earlier.read_text().splitlines()]
    assert {record["what"] for record in printed["records"]} == {"time", "error", "host", "missing"}


def test_a_folder_holds_records_table_and_figure_and_is_not_overwritten(earlier: Path, tmp_path: Path) -> None:
    arguments = ["bench", "--from", str(earlier), "--json", "-o", str(tmp_path / "out")]
    assert RUNNER.invoke(main, arguments).exit_code == 0
    assert (tmp_path / "out" / RECORDS).read_text() == earlier.read_text()
    rows = list(csv.DictReader((tmp_path / "out" / TABLE).open()))
    assert len(rows) == len(earlier.read_text().splitlines())
    assert {(row["provider"], row["pass"]) for row in rows if row["what"] == "time"} >= {("liger", "full")}
    figure = (tmp_path / "out" / FIGURE).read_text()
    assert all(word in figure for word in ("ligerprof:lean", "floor", "vocabulary", "ce bf16, full"))

    again = RUNNER.invoke(main, arguments)
    assert (again.exit_code, again.stdout) == (1, "")
    assert again.stderr.startswith("Error: ")
    assert again.stderr.count("\n") == 1
    assert RUNNER.invoke(main, [*arguments, "--force"]).exit_code == 0


def test_files_by_name(earlier: Path, tmp_path: Path) -> None:
    table, figure = tmp_path / "times.csv", tmp_path / "times.png"
    arguments = ["bench", "--from", str(earlier), "--from", str(earlier), "--csv", str(table), "--figure", str(figure)]
    assert RUNNER.invoke(main, arguments).exit_code == 0
    assert table.read_text().count("\n") == earlier.read_text().count("\n") + 1
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["rms"], 1, "no CUDA device"),
        ([], 2, "name a kernel"),
        (["rmss"], 2, "unknown kernel 'rmss'"),
        (["rms", "--shapes", "llama9"], 2, "unknown model 'llama9'"),
        (["rms", "--figure", "times.gif"], 2, ".gif"),
        (["rms", "--pass", "sideways"], 2, "--pass"),
        (["--from", "no-such.jsonl"], 2, "no-such.jsonl"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_done_is_one_line(
    arguments: list[str], code: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = RUNNER.invoke(main, ["bench", *arguments])
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.splitlines()[-1].startswith("Error: ")
    assert says in result.stderr
    assert "Traceback" not in result.stderr


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"schema": 1, "what": "time"}\n')
    result = RUNNER.invoke(main, ["bench", "--from", str(path)])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert "bad.jsonl, line 1" in result.stderr
