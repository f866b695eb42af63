"""Terminal tables and JSON of a bench: times, errors and host costs."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ligerprof.reports.listing import listing_table
from ligerprof.runs.bench.records import Direction, ErrorRecord, Finding, HostRecord, MissingRecord, TimeRecord
from ligerprof.serialization import document
from ligerprof.units import format_mib

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

Kind = TypeVar("Kind", TimeRecord, ErrorRecord, HostRecord, MissingRecord)
_Shape = tuple[str, str, str, str]


def bench_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """The object of `ligerprof bench --json`: the same flat records that -o writes as JSON Lines."""
    return document("bench", {"records": [finding.row() for finding in findings]})


def render_bench(findings: Sequence[Finding]) -> "RenderableType":
    """Tables of all findings for a terminal."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for heading, table in _tables(findings):
        parts.append(Text(heading, style="bold"))
        parts += [table] if table is not None else []
    return Group(*parts)


def _tables(findings: Sequence[Finding]) -> "Iterator[tuple[str, Table | None]]":
    for environment in dict.fromkeys(_environment(finding.environment) for finding in findings):
        yield environment, None
    for (kernel, shape, sizes, dtype), times in _by_shape(_of_kind(findings, TimeRecord)).items():
        yield f"\n{kernel} {shape}: {sizes} {dtype}", _times_table(times)
    for (kernel, shape, sizes, dtype), errors in _by_shape(_of_kind(findings, ErrorRecord)).items():
        yield f"\n{kernel} {shape}: error against fp64 at {sizes} {dtype}, and over torch's", _errors_table(errors)
    if hosts := _of_kind(findings, HostRecord):
        yield "\nthe host's cost of forward and backward, tiny tensors", _host_table(hosts)
    if missing := _of_kind(findings, MissingRecord):
        yield "\nnot measured", _missing_table(missing)


def _environment(environment: Mapping[str, str]) -> str:
    """GPU and versions in one line."""
    versions = (f"{name} {text}" for name, text in environment.items() if name not in ("gpu", "date"))
    return ", ".join([environment.get("gpu", "unknown GPU"), *versions])


def _of_kind(findings: Iterable[Finding], kind: type[Kind]) -> list[Kind]:
    return [finding.record for finding in findings if isinstance(finding.record, kind)]


def _by_shape(records: Iterable[Kind]) -> dict[_Shape, list[Kind]]:
    groups: dict[_Shape, list[Kind]] = {}
    for record in records:
        subject = record.subject
        groups.setdefault((subject.kernel, subject.shape, subject.sizes, subject.dtype), []).append(record)
    return groups


def _times_table(records: Sequence[TimeRecord]) -> "Table":
    figures = ("median, ms", "20 %", "80 %", "of floor", "extra peak, MiB")
    table = listing_table("pass", "provider", *figures, right=figures)
    for direction in Direction:
        rows = sorted((row for row in records if row.direction is direction), key=lambda row: row.median_seconds)
        for number, row in enumerate(rows):
            table.add_row(
                direction.value if number == 0 else "",
                row.subject.provider,
                *(f"{seconds * 1000:.3f}" for seconds in (row.median_seconds, row.low_seconds, row.high_seconds)),
                "-" if row.floor_share is None else f"{100 * row.floor_share:.1f} %",
                "n/a" if row.extra_peak_bytes is None else format_mib(row.extra_peak_bytes),
                end_section=number == len(rows) - 1,
            )
    return table


def _errors_table(records: Sequence[ErrorRecord]) -> "Table":
    tensors = tuple(dict.fromkeys(record.tensor for record in records))
    counted = ("chunks",) if any(record.chunks is not None for record in records) else ()
    table = listing_table("data", "provider", *counted, *tensors, right=(*counted, *tensors))
    regimes: dict[str, dict[str, dict[str, ErrorRecord]]] = {}
    for record in records:
        regimes.setdefault(record.regime, {}).setdefault(record.subject.provider, {})[record.tensor] = record
    for regime, providers in regimes.items():
        for number, (provider, cells) in enumerate(providers.items()):
            chunks = next(iter(cells.values())).chunks
            table.add_row(
                regime if number == 0 else "",
                provider,
                *(("" if chunks is None else str(chunks)) for _ in counted),
                *(_error_cell(cells.get(tensor)) for tensor in tensors),
                end_section=number == len(providers) - 1,
            )
    return table


def _error_cell(record: ErrorRecord | None) -> str:
    if record is None:
        return ""
    return f"{record.error:.1e}" if record.ratio is None else f"{record.error:.1e} x{record.ratio:.2f}"


def _host_table(records: Sequence[HostRecord]) -> "Table":
    figures = ("us per call", "waits for the device")
    table = listing_table("kernel", "provider", "dtype", *figures, right=figures)
    for record in records:
        subject = record.subject
        microseconds = f"{record.host_seconds * 1e6:.0f}"
        table.add_row(subject.kernel, subject.provider, subject.dtype, microseconds, str(record.synchronizations))
    return table


def _missing_table(records: Sequence[MissingRecord]) -> "Table":
    shapes: dict[tuple[str, str, str], list[str]] = {}
    for record in records:
        subject = record.subject
        shapes.setdefault((subject.kernel, subject.provider, record.reason), []).append(subject.shape)
    table = listing_table("kernel", "shapes", "provider", "reason", folded=("shapes", "reason"))
    for (kernel, provider, reason), names in shapes.items():
        table.add_row(kernel, ", ".join(dict.fromkeys(names)), provider, reason)
    return table
