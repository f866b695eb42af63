"""The records of a benchmark: one flat object per measurement, as JSON Lines or CSV."""

import csv
import dataclasses
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

from ligerprof.errors import LigerprofError
from ligerprof.files import FileKind, parse_object, read_text
from ligerprof.serialization import SCHEMA, to_json


class BenchFileError(LigerprofError):
    """A file of bench records that cannot be read."""


_FILE = FileKind(error=BenchFileError, hint="Give a file that `ligerprof bench -o` wrote.")


class Direction(str, Enum):
    """The timed pass; `full` is forward and backward in one."""

    FORWARD = "forward"
    BACKWARD = "backward"
    FULL = "full"


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A kernel of a provider at some sizes.

    Attributes:
        provider: with its variant, such as `ligerprof:lean`.
        sizes: the ones that the kernel depends on, such as `4096x2048x128256`.
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
        extra_peak_bytes: peak of a forward and backward pass, minus the bytes allocated before it.
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
    """The host's cost of forward and backward.

    Attributes:
        host_seconds: time to launch both at a tiny shape.
        synchronizations: number of times that the host waits for the device.
        synchronization: torch's message about the first wait, or None.
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
    """A record and the environment it was measured in: `gpu`, `date` (UTC) and versions."""

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
        own = to_json(self.record)
        subject = own.pop("subject")
        if "direction" in own:
            own = {"pass": own.pop("direction"), **own}
        return {"schema": SCHEMA, "what": self.record.what, **subject, **own, **self.environment}


def finding_from_row(row: Mapping[str, Any]) -> Finding:
    """Parse the result of `Finding.row`.

    Raises:
        BenchFileError: it is not a record.
    """
    left = dict(row)
    try:
        if left.pop("schema") != SCHEMA:
            raise BenchFileError(f"a record of schema {row['schema']}; this version reads {SCHEMA}.")
        kind = _KINDS[left.pop("what")]
        subject = Subject(**{item.name: left.pop(item.name) for item in dataclasses.fields(Subject)})
        if "pass" in left:
            left["direction"] = Direction(left.pop("pass"))
        own = {item.name: left.pop(item.name) for item in dataclasses.fields(kind) if item.name in left}
        return Finding(
            record=kind(subject=subject, **own), environment={name: str(text) for name, text in left.items()}
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BenchFileError(f"not a bench record ({type(error).__name__}: {error}).") from None


def write_lines(findings: Iterable[Finding]) -> str:
    """The findings as JSON Lines."""
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
    return tuple({finding.key: finding for group in groups for finding in group}.values())


def write_csv(findings: Sequence[Finding]) -> str:
    """CSV with one line per finding and the columns of all kinds; cells that a kind lacks are empty."""
    rows = [finding.row() for finding in findings]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    table = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()
