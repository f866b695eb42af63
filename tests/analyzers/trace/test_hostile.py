"""Hostile and damaged traces give a report or a one-line error, in bounded time and memory."""

import gzip
import io
import json
import lzma
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ligerprof.analyzers.trace.analysis import analyze
from ligerprof.analyzers.trace.events import collect, read_trace
from ligerprof.errors import LigerprofError, TraceFormatError
from ligerprof.units import MIB
from tests.analyzers.trace.entries import RECORDING, Entry, call, copy, kernel, operator, step, write

GOOD = (step(0, 100), operator(1, 8, **{"External id": 3}), call(2, 3, 5), kernel(10, 20, correlation=5))

CHILD = """
import sys, time
from pathlib import Path
from ligerprof.analyzers.trace.analysis import analyze
from ligerprof.analyzers.trace.events import read_trace
from ligerprof.errors import LigerprofError
began = time.process_time()
try:
    analyze(read_trace(sys.argv[1]))
    print("a report")
except LigerprofError as error:
    assert "\\n" not in str(error)
    print(error)
assert time.process_time() - began < float(sys.argv[2])
# VmHWM is of this process only; ru_maxrss starts at its parent's size
highest_kib = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
assert highest_kib < int(sys.argv[3]) * 2**10, highest_kib
"""


def outcome_in_bounds(path: Path, *, seconds: float = 10, mebibytes: int = 300) -> str:
    """Analyze a trace in a child process, which fails if it exceeds the bounds; return its output."""
    finished = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), str(seconds), str(mebibytes)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


def packed_run(piece: bytes, mebibytes: int, start: bytes = b'{"traceEvents": [') -> bytes:
    """A gzip file that repeats a short piece."""
    packed = io.BytesIO()
    many = piece * (MIB // len(piece))
    with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=9) as file:
        file.write(start)
        for _ in range(mebibytes):
            file.write(many)
    return packed.getvalue()


@pytest.mark.parametrize(
    ("piece", "says"),
    [
        (b" ", "to more than 97.2 MiB"),
        pytest.param(b"{},", "more than 1,000,000 entries are not trace events", marks=pytest.mark.slow),
        (b"[", "nested too deeply"),
        (b"[],", "more than 1,000,000 entries are not trace events"),
        (b'"' + b"x" * 1000, "expected ',' or ']'"),
    ],
    ids=["spaces", "empty events", "brackets", "empty lists", "texts"],
)
def test_a_gzip_bomb_is_refused(piece: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(packed_run(piece, 200))

    assert path.stat().st_size < MIB
    assert says in outcome_in_bounds(path, seconds=20)


def test_one_endless_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(packed_run(b"x", 60, start=b'{"traceEvents": [{"name": "'))
    assert "a value is longer than 16.0 MiB" in outcome_in_bounds(path)


def test_as_many_threads_devices_and_names_as_events_take_no_longer(tmp_path: Path) -> None:
    entries: list[Entry] = []
    for index in range(20_000):
        start, tid = index * 10, index + 1000
        node = "autograd::engine::evaluate_function: Some"
        entries += [
            step(start, 10, index),
            operator(start, 8, f"{node}{index}Backward0", tid=tid, **{"External id": index}),
            call(start + 1, 2, index, tid=tid),
            kernel(start + 4, 3, f"kernel_{index}", device=index, correlation=index, **{"External id": index}),
        ]
    path = write(tmp_path / "wide.json", *entries)

    assert outcome_in_bounds(path, seconds=20) == "a report"


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress], ids=["gzip", "xz"])
def test_truncated_or_damaged_compressed_data_is_one_line(pack: Any, tmp_path: Path) -> None:
    packed = pack(json.dumps({"traceEvents": GOOD * 400}).encode())
    path = tmp_path / "trace.json"
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(TraceFormatError, match=r"data ends early\. Was the file cut short\?"):
        analyze(read_trace(path))
    path.write_bytes(packed[: len(packed) // 2] + b"\xff" * 40 + packed[len(packed) // 2 :])
    with pytest.raises(TraceFormatError, match="damaged"):
        analyze(read_trace(path))


def test_names_do_not_reach_the_terminal_as_commands(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(
        json.dumps({"traceEvents": [*GOOD, kernel(40, 5, "\x1b[2J\ud800\n[red]gemm")]}).encode()
        # a name that is not valid UTF-8
        + b" "
    )
    names = [entry.name for entry in analyze(read_trace(path)).kernels]
    assert "?[2J???[red]gemm".replace("???", "??") in names
    "".join(names).encode()


STRANGE_VALUES: list[Any] = [None, True, -1, 0, 1.5, -1e300, float("nan"), float("inf"), 10**400, 2**63, "5", [], {}]


@pytest.mark.parametrize("key", ["ph", "cat", "name", "pid", "tid", "ts", "dur", "args"])
@pytest.mark.parametrize("value", [..., *STRANGE_VALUES], ids=repr)
def test_a_strange_field_costs_its_entry_at_most(key: str, value: Any) -> None:
    def changed(entry: Entry) -> Entry:
        rest = {name: kept for name, kept in entry.items() if name != key}
        return rest if value is ... else {**rest, key: value}

    report = analyze(collect("trace", [*GOOD, *(changed(entry) for entry in GOOD[1:]), changed(copy(50, 1))]))

    text = json.dumps(report.to_json(), allow_nan=False)
    assert json.loads(text)["kernels"] >= 1
    assert report.window_seconds == pytest.approx(100e-6)


@pytest.mark.parametrize("key", ["device", "stream", "correlation", "External id", "Sequence number", "Fwd thread id"])
@pytest.mark.parametrize("value", STRANGE_VALUES, ids=repr)
def test_a_strange_argument_is_an_absent_one(key: str, value: Any) -> None:
    entries = [{**entry, "args": {**entry.get("args", {}), key: value}} for entry in GOOD]
    report = analyze(collect("trace", entries))
    assert json.loads(json.dumps(report.to_json(), allow_nan=False))["kernels"] == 1


@pytest.mark.parametrize("entry", [None, 3, "text", [], [[]], True], ids=repr)
def test_entries_of_another_type_are_counted(entry: Any) -> None:
    report = analyze(collect("trace", [entry, *GOOD]))
    assert report.notes[-1] == "entries without a usable time, duration or name, skipped: 1"


def test_extreme_times_do_not_overflow(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", step(-(2**61), 2**62 - 1), kernel(2**61, 5), kernel(0, 2**61))
    json.dumps(analyze(read_trace(path)).to_json(), allow_nan=False)


@pytest.mark.parametrize("rounds", [150, pytest.param(10_000, marks=pytest.mark.slow)])
def test_damaged_bytes_are_a_report_or_one_error(rounds: int, tmp_path: Path) -> None:
    whole = lzma.decompress(RECORDING.read_bytes())
    # the step and some whole entries of each kind
    entries = json.loads(whole)["traceEvents"]
    kept = [entry for entry in entries if "ProfilerStep" in entry.get("name", "")] + entries[-150:] + entries[:250]
    text = json.dumps({"traceEvents": kept}).encode()
    draw, errors = random.Random(3), 0
    path = tmp_path / "damaged.json"
    for _ in range(rounds):
        damaged = bytearray(text)
        for _ in range(draw.choice([1, 1, 2, 8])):
            at = draw.randrange(len(damaged))
            if draw.random() < 0.7:
                damaged[at] = draw.choice(b'{}[]",:0123456789.-+eE \x00\xff\\u')
            else:
                del damaged[at : at + draw.randrange(1, 40)]
        path.write_bytes(damaged)
        try:
            json.dumps(analyze(read_trace(path)).to_json(), allow_nan=False)
        except LigerprofError as error:
            errors += 1
            message = str(error)
            assert message.startswith(str(path)), message
    assert errors
