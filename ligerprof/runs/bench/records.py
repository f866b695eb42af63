"""The records of a benchmark: one flat object per measurement, as JSON Lines or CSV."""

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
    """A kernel of a provider at some sizes.

    Attributes:
        provider: with its variant, such as `ligerprof:lean`.
        shape: name of the shape.
        sizes: those that the kernel depends on, such as `4096x2048x128256`.
    """

    kernel: str
    provider: str
    shape: str
    sizes: str
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeRecord:
    """The time of one direction.

    Attributes:
        median_seconds, low_seconds, high_seconds: median, 20 % and 80 % quantile of the device time.
        floor: `products` (the three matrix products alone), `copy` (of as many bytes as the operation must move), or
            empty; timed in turns with the kernel.
        floor_share: floor over median.
        copy_rate_share: the fewest bytes over the median, as a share of a 1 GiB copy's bandwidth; for `copy` only.
        extra_peak_bytes: peak bytes of a forward and backward pass beyond its inputs.
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
    """The relative Frobenius error of one result against fp64.

    Attributes:
        regime: the data: `random init`, `std 5`, …
        tensor: `loss`, `output`, or a gradient such as `d_hidden`.
        chunks: passes over the head's weight, None if unknown.
        eager_error: the error of torch's eager reference on the same data.
        ratio: error over eager_error, None if that is zero.
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
    """The host's cost of a call.

    Attributes:
        host_seconds: time until forward and backward of a tiny shape are launched.
        synchronizations: times the host waits for the device in forward and backward.
        synchronization: torch's message about the first one, or None.
    """

    what: ClassVar[str] = "host"
    subject: Subject
    host_seconds: float
    synchronizations: int
    synchronization: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MissingRecord:
    """A provider without a result, and the reason."""

    what: ClassVar[str] = "missing"
    subject: Subject
    reason: str


Record = TimeRecord | ErrorRecord | HostRecord | MissingRecord
_KINDS: dict[str, type[Any]] = {kind.what: kind for kind in (TimeRecord, ErrorRecord, HostRecord, MissingRecord)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A record and the environment it was measured in.

    Attributes:
        environment: `gpu`, `date` (UTC) and versions.
    """

    record: Record
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, ...]:
        """Findings with the same key measure the same thing on the same GPU with the same versions."""
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
    """Parse the result of `Finding.row`.

    Raises:
        BenchFileError: it is not a record.
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
        raise BenchFileError(f"not a bench record ({type(error).__name__}: {error}).") from None


def write_lines(findings: Iterable[Finding]) -> str:
    """JSON Lines, one finding per line."""
    return "".join(json.dumps(finding.row()) + "\n" for finding in findings)


def read_lines(path: Path) -> list[Finding]:
    """Findings of a JSON Lines file.

    Raises:
        BenchFileError: a line is not a record; the error names the file and the line.
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
    """Join groups of findings in order; of those with the same key the last counts."""
    latest: dict[tuple[str, ...], Finding] = {}
    for group in groups:
        for finding in group:
            latest[finding.key] = finding
    return tuple(latest.values())


def write_csv(findings: Sequence[Finding]) -> str:
    """CSV with one line per finding and the columns of all kinds; cells that a kind lacks are empty."""
    rows = [finding.row() for finding in findings]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    table = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()
