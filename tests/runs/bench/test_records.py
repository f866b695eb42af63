import csv
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ligerprof.runs.bench.records import (
    BenchFileError,
    Direction,
    ErrorRecord,
    Finding,
    HostRecord,
    MissingRecord,
    Subject,
    TimeRecord,
    finding_from_row,
    join_findings,
    read_lines,
    write_csv,
    write_lines,
)

WORDS = st.text(alphabet="ab1 :+,;\"'\n\té…", max_size=8)
SIZES = st.floats(0, 1e6)
SUBJECTS = st.builds(Subject, kernel=WORDS, provider=WORDS, shape=WORDS, sizes=WORDS, dtype=WORDS)
RECORDS = st.one_of(
    st.builds(
        TimeRecord,
        subject=SUBJECTS,
        direction=st.sampled_from(Direction),
        median_seconds=SIZES,
        low_seconds=SIZES,
        high_seconds=SIZES,
        repetitions=st.integers(1, 99),
        floor=WORDS,
        floor_seconds=st.none() | SIZES,
        floor_share=st.none() | SIZES,
        copy_rate_share=st.none() | SIZES,
        extra_peak_bytes=st.none() | st.integers(0, 2**50),
    ),
    st.builds(
        ErrorRecord,
        subject=SUBJECTS,
        regime=WORDS,
        tensor=WORDS,
        error=SIZES,
        eager_error=SIZES,
        ratio=st.none() | SIZES,
        chunks=st.none() | st.integers(1, 99),
    ),
    st.builds(
        HostRecord,
        subject=SUBJECTS,
        host_seconds=SIZES,
        synchronizations=st.integers(0, 9),
        synchronization=st.none() | WORDS,
    ),
    st.builds(MissingRecord, subject=SUBJECTS, reason=WORDS),
)
ENVIRONMENTS = st.dictionaries(st.sampled_from(["gpu", "date", "torch", "liger-kernel"]), WORDS)
FINDINGS = st.builds(Finding, record=RECORDS, environment=ENVIRONMENTS)


def timing(provider: str, seconds: float, **environment: str) -> Finding:
    subject = Subject(kernel="rms", provider=provider, shape="C", sizes="8192x4096", dtype="bf16")
    record = TimeRecord(
        subject=subject,
        direction=Direction.FULL,
        median_seconds=seconds,
        low_seconds=seconds,
        high_seconds=seconds,
        repetitions=10,
    )
    return Finding(record=record, environment=environment)


@given(FINDINGS)
def test_a_finding_comes_back_from_its_line_as_it_was(finding: Finding) -> None:
    assert finding_from_row(json.loads(write_lines([finding]))) == finding


@given(st.lists(FINDINGS, max_size=6), st.lists(FINDINGS, max_size=6))
def test_files_are_joined_by_reading_one_after_the_other(first: list[Finding], second: list[Finding]) -> None:
    joined = join_findings(first, second)
    assert joined == join_findings([*first, *second]) == join_findings(joined)
    assert {finding.key for finding in joined} == {finding.key for finding in (*first, *second)}
    assert set(map(repr, second)) >= {repr(item) for item in joined if item.key in {new.key for new in second}}


def test_of_the_same_measurement_the_latest_counts_and_other_versions_stand_beside_it() -> None:
    old, new = timing("liger", 2.0, date="monday", torch="2.11"), timing("liger", 1.0, date="friday", torch="2.11")
    other = timing("liger", 3.0, date="monday", torch="2.13")
    assert join_findings([old, other], [new]) == (new, other)


@given(st.lists(FINDINGS, min_size=1, max_size=8))
def test_csv_holds_every_row(findings: list[Finding]) -> None:
    table = list(csv.DictReader(io.StringIO(write_csv(findings), newline="")))
    assert len(table) == len(findings)
    for cells, finding in zip(table, findings, strict=True):
        for name, value in finding.row().items():
            if isinstance(value, (int, float)):
                assert float(cells[name]) == value
            elif value is None:
                assert cells[name] == ""
            else:
                assert cells[name] == str(value)


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        "not json",
        "{}",
        '{"schema": 2, "what": "time"}',
        '{"schema": 1, "what": "tune"}',
        '{"schema": 1, "what": ["time"]}',
        '{"schema": 1, "what": "missing", "kernel": "rms"}',
    ],
)
def test_what_is_no_record_is_refused_with_its_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bench.jsonl"
    path.write_text(write_lines([timing("torch", 1.0)]) + text + "\n")
    with pytest.raises(BenchFileError, match="line 2"):
        read_lines(path)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BenchFileError, match=r"bench\.jsonl"):
        read_lines(path)
