"""How a bench is shown: tables of times, errors and host costs."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ligerprof.reports.listing import listing_table
from ligerprof.runs.bench.floors import Direction
from ligerprof.runs.bench.records import SCHEMA, ErrorRecord, Finding, HostRecord, MissingRecord, Record, TimeRecord
from ligerprof.units import format_mib

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

Kind = TypeVar("Kind", TimeRecord, ErrorRecord, HostRecord, MissingRecord)


def bench_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """The object of `ligerprof bench --json`: the same flat records that -o writes as JSON Lines."""
    return {"schema": SCHEMA, "kind": "bench", "records": [finding.row() for finding in findings]}


def render_bench(findings: Sequence[Finding]) -> "RenderableType":
    """Lay findings out for a terminal."""
    from rich.console import Group
    from rich.text import Text

    records = [finding.record for finding in findings]
    parts: list[RenderableType] = []
    for heading in _environments(findings):
        parts.append(Text(heading, style="bold"))
    times = _of_kind(records, TimeRecord)
    for kernel, shape, sizes, dtype in _shapes(times):
        here = [record for record in times if _place(record) == (kernel, shape, sizes, dtype)]
        parts += [Text(f"\n{kernel} {shape}: {sizes} {dtype}", style="bold"), _times_table(here)]
    parts += _errors_part(_of_kind(records, ErrorRecord))
    parts += _host_part(_of_kind(records, HostRecord))
    parts += _missing_part(_of_kind(records, MissingRecord))
    return Group(*parts)


def _environments(findings: Sequence[Finding]) -> Iterable[str]:
    """One line for each card and set of versions."""
    lines: dict[str, None] = {}
    for finding in findings:
        told = {name: text for name, text in finding.environment.items() if name not in ("gpu", "date")}
        parts = [finding.environment.get("gpu", "unknown GPU"), *(f"{name} {text}" for name, text in told.items())]
        lines[", ".join(parts)] = None
    return lines


def _of_kind(records: Iterable[Record], kind: type[Kind]) -> list[Kind]:
    return [record for record in records if isinstance(record, kind)]


def _place(record: Record) -> tuple[str, str, str, str]:
    subject = record.subject
    return subject.kernel, subject.shape, subject.sizes, subject.dtype


def _shapes(records: Iterable[Record]) -> Iterable[tuple[str, str, str, str]]:
    return dict.fromkeys(_place(record) for record in records)


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


def _errors_part(records: Sequence[ErrorRecord]) -> "Iterable[RenderableType]":
    from rich.text import Text

    for kernel, shape, sizes, dtype in _shapes(records):
        here = [record for record in records if _place(record) == (kernel, shape, sizes, dtype)]
        yield Text(f"\n{kernel} {shape}: error against fp64 at {sizes} {dtype}, and over torch's", style="bold")
        yield _errors_table(here)


def _errors_table(records: Sequence[ErrorRecord]) -> "Table":
    tensors = tuple(dict.fromkeys(record.tensor for record in records))
    counted = ("chunks",) if any(record.chunks is not None for record in records) else ()
    table = listing_table("data", "provider", *counted, *tensors, right=(*counted, *tensors))
    for regime in dict.fromkeys(record.regime for record in records):
        providers = dict.fromkeys(record.subject.provider for record in records if record.regime == regime)
        for number, provider in enumerate(providers):
            cells = {
                record.tensor: record
                for record in records
                if record.regime == regime and record.subject.provider == provider
            }
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


def _host_part(records: Sequence[HostRecord]) -> "Iterable[RenderableType]":
    from rich.text import Text

    if not records:
        return
    figures = ("us a call", "waits for the device")
    table = listing_table("kernel", "provider", "dtype", *figures, right=figures)
    for record in records:
        subject = record.subject
        microseconds = f"{record.host_seconds * 1e6:.0f}"
        table.add_row(subject.kernel, subject.provider, subject.dtype, microseconds, str(record.synchronizations))
    yield Text("\nthe host's cost of forward and backward, tiny tensors", style="bold")
    yield table


def _missing_part(records: Sequence[MissingRecord]) -> "Iterable[RenderableType]":
    from rich.text import Text

    if not records:
        return
    shapes: dict[tuple[str, str, str], list[str]] = {}
    for record in records:
        subject = record.subject
        shapes.setdefault((subject.kernel, subject.provider, record.reason), []).append(subject.shape)
    table = listing_table("kernel", "shapes", "provider", "reason", folded=("shapes", "reason"))
    for (kernel, provider, reason), names in shapes.items():
        table.add_row(kernel, ", ".join(dict.fromkeys(names)), provider, reason)
    yield Text("\nnot measured", style="bold")
    yield table
