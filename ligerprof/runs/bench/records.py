"""What a bench leaves: one flat record a finding, as JSON Lines that can be joined and as CSV."""

import csv
import dataclasses
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ligerprof.errors import LigerprofError
from ligerprof.files import FileKind, parse_object, read_text
from ligerprof.runs.bench.floors import Direction

SCHEMA = 1


class BenchFileError(LigerprofError):
    """A file of bench records that cannot be read."""


_FILE = FileKind(error=BenchFileError, hint="Give a file that `ligerprof bench -o` wrote.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """Whose kernel, at which sizes.

    Attributes:
        provider: with its variant, such as `ligerprof:lean`.
        shape: name of the shape.
        sizes: what the kernel sees of it, such as `4096x2048x128256`.
    """

    kernel: str
    provider: str
    shape: str
    sizes: str
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeRecord:
    """How long one direction takes.

    Attributes:
        median_seconds, low_seconds, high_seconds: median, 20 % and 80 % quantile of the device's time.
        floor: what the floor is: `products` (the three matrix products alone), `copy` (of as many bytes as the
            operation must move), or empty; measured in turns with the kernel.
        floor_share: floor over median.
        copy_rate_share: the fewest bytes over the median, as a share of the rate of a copy of 1 GiB; beside `copy`.
        extra_peak_bytes: what a forward and backward pass hold at most beyond inputs.
    """

    what: ClassVar[str] = "time"
    subject: Subject
    direction: Direction
    median_seconds: float
    low_seconds: float
    high_seconds: float
    repetitions: int
    floor: str = ""
    floor_seconds: float | None = None
    floor_share: float | None = None
    copy_rate_share: float | None = None
    extra_peak_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorRecord:
    """How far one result is from fp64: relative Frobenius error.

    Attributes:
        regime: which data: `random init`, `std 5`, …
        tensor: `loss`, `output`, or a gradient such as `d_hidden`.
        chunks: passes over the vocabulary's weight where the provider tells, None elsewhere.
        eager_error: what torch's eager reference makes of the same data.
        ratio: error over eager_error, None where that is zero.
    """

    what: ClassVar[str] = "error"
    subject: Subject
    regime: str
    tensor: str
    error: float
    eager_error: float
    ratio: float | None
    chunks: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRecord:
    """What a call costs the host.

    Attributes:
        host_seconds: until forward and backward of a tiny shape are launched.
        synchronizations: times the host waits for the device in forward and backward.
        synchronization: torch's message about the first of them, or None.
    """

    what: ClassVar[str] = "host"
    subject: Subject
    host_seconds: float
    synchronizations: int
    synchronization: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MissingRecord:
    """A provider that gave no figure, and why."""

    what: ClassVar[str] = "missing"
    subject: Subject
    reason: str


Record = TimeRecord | ErrorRecord | HostRecord | MissingRecord
_KINDS: dict[str, type[Any]] = {kind.what: kind for kind in (TimeRecord, ErrorRecord, HostRecord, MissingRecord)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A record and where it was made.

    Attributes:
        environment: `gpu`, `date` (UTC) and versions.
    """

    record: Record
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, ...]:
        """Findings with one key measure the same thing on the same card with the same versions."""
        record = self.record
        details = [str(getattr(record, name, "")) for name in ("direction", "regime", "tensor")]
        versions = [f"{name}={text}" for name, text in sorted(self.environment.items()) if name != "date"]
        return (record.what, *dataclasses.astuple(record.subject), *details, *versions)

    def row(self) -> dict[str, Any]:
        """One flat JSON object."""
        own = {item.name: getattr(self.record, item.name) for item in dataclasses.fields(self.record)}
        subject = dataclasses.asdict(own.pop("subject"))
        if "direction" in own:
            own = {"pass": own.pop("direction").value, **own}
        return {"schema": SCHEMA, "what": self.record.what, **subject, **own, **self.environment}


def finding_from_row(row: Mapping[str, Any]) -> Finding:
    """Read back what `Finding.row` made.

    Raises:
        BenchFileError: it is none.
    """
    rest = dict(row)
    try:
        if rest.pop("schema") != SCHEMA:
            raise BenchFileError(f"a record of schema {row['schema']}; this version reads {SCHEMA}.")
        kind = _KINDS[rest.pop("what")]
        subject = Subject(**{item.name: rest.pop(item.name) for item in dataclasses.fields(Subject)})
        if "pass" in rest:
            rest["direction"] = Direction(rest.pop("pass"))
        own = {item.name: rest.pop(item.name) for item in dataclasses.fields(kind) if item.name in rest}
        return Finding(record=kind(subject=subject, **own), environment={name: str(rest[name]) for name in rest})
    except (KeyError, TypeError, ValueError) as error:
        raise BenchFileError(f"no bench record ({type(error).__name__}: {error}).") from None


def write_lines(findings: Iterable[Finding]) -> str:
    """JSON Lines, one finding a line."""
    return "".join(json.dumps(finding.row()) + "\n" for finding in findings)


def read_lines(path: Path) -> list[Finding]:
    """Findings of a JSON Lines file.

    Raises:
        BenchFileError: with the file and the line.
    """
    findings = []
    for number, line in enumerate(read_text(path, _FILE).splitlines(), start=1):
        source = f"{path}, line {number}"
        row = parse_object(line, source, _FILE)
        try:
            findings.append(finding_from_row(row))
        except BenchFileError as error:
            raise BenchFileError(f"{source}: {error} {_FILE.hint}") from None
    return findings


def join_findings(*groups: Sequence[Finding]) -> tuple[Finding, ...]:
    """One collection of several, in order; of findings with one key the latest counts."""
    latest: dict[tuple[str, ...], Finding] = {}
    for group in groups:
        for finding in group:
            latest[finding.key] = finding
    return tuple(latest.values())


def write_csv(findings: Sequence[Finding]) -> str:
    """One line a finding, with the columns of all kinds; a cell that a kind has not is empty."""
    rows = [finding.row() for finding in findings]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    table = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()
