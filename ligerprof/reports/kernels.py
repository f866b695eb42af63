"""Render `ligerprof kernels` and `bench`: what each kernel replaces, where it can run, times, errors, host costs."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

from ligerprof.kernels.device import DEVICE_KINDS
from ligerprof.kernels.registry import KernelRegistry
from ligerprof.kernels.selection import SLOTS, inapplicable_reason
from ligerprof.kernels.spec import KernelSpec
from ligerprof.models import ModelSpec
from ligerprof.reports.env import no_gpu_reason
from ligerprof.reports.terminal import bold, listing_table, stacked
from ligerprof.runs.bench.records import Direction, ErrorRecord, Finding, HostRecord, MissingRecord, TimeRecord
from ligerprof.runs.kernel_check.check import KernelCheck, Result
from ligerprof.serialization import document, select, to_json
from ligerprof.units import format_mib

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelState:
    """Whether one kernel can be used here.

    Attributes:
        inapplicable_reason: why the model has no use for the kernel; None if it has, or without a model.
        unavailable_reasons: by kind of device, why the kernel cannot run there, or None.
    """

    kernel: KernelSpec
    inapplicable_reason: str | None
    unavailable_reasons: Mapping[str, str | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelListing:
    """The result of `ligerprof kernels`; `broken`: why plug-ins could not be loaded, by entry point."""

    model: ModelSpec | None
    kernels: tuple[KernelState, ...]
    broken: Mapping[str, str]


def list_states(registry: KernelRegistry, model: ModelSpec | None) -> KernelListing:
    """Check for each kernel whether it applies to the model and where it can run."""
    no_gpu = no_gpu_reason()

    def unavailable_reason(kernel: KernelSpec, kind: str) -> str | None:
        # kernels in plain torch are available on `cuda` without checking for a GPU
        return no_gpu if kind == "cuda" and no_gpu is not None else kernel.unavailable_reason(kind)

    states = (
        KernelState(
            kernel=kernel,
            inapplicable_reason=kernel.applies(model) if model is not None else None,
            unavailable_reasons={kind: unavailable_reason(kernel, kind) for kind in DEVICE_KINDS},
        )
        for kernel in registry.kernels
    )
    broken = {plugin.entry_point: plugin.reason for plugin in registry.broken}
    return KernelListing(model=model, kernels=tuple(states), broken=broken)


def kernels_json(listing: KernelListing) -> dict[str, Any]:
    """The object of `ligerprof kernels --json`; `applies` is null without a model."""
    kernels = [
        {
            **select(state, "kernel.name", "kernel.provider", "kernel.slot"),
            "replaces": SLOTS[state.kernel.slot].title,
            "title": state.kernel.title,
            "applies": None if listing.model is None else state.inapplicable_reason is None,
            **select(state, "inapplicable_reason", "unavailable_reasons"),
        }
        for state in listing.kernels
    ]
    broken = [{"entry_point": entry, "reason": reason} for entry, reason in listing.broken.items()]
    model = listing.model.name if listing.model is not None else None
    return document("kernels", {"model": model, "kernels": kernels, "broken_plugins": broken})


def render_kernels(listing: KernelListing) -> "RenderableType":
    """Lay out the listing, at most 100 columns wide, with each reason once below the table."""
    from rich.text import Text

    found = (reason for state in listing.kernels for reason in state.unavailable_reasons.values() if reason is not None)
    numbers = {reason: number for number, reason in enumerate(dict.fromkeys(found), 1)}
    rows = []
    for state in listing.kernels:
        reasons = state.unavailable_reasons.values()
        cells = ("yes" if reason is None else f"no [{numbers[reason]}]" for reason in reasons)
        rows.append((state.kernel.name, state.kernel.provider, state.kernel.title, *cells))
    return stacked(
        _slots_table(listing.model),
        listing_table("kernel", "provider", "how", *DEVICE_KINDS, folded=("how",), rows=rows),
        *(f"[{number}] {reason}" for reason, number in numbers.items()),
        *(Text(f"Broken plug-in {entry}: {reason}", style="red") for entry, reason in listing.broken.items()),
    )


def _slots_table(model: ModelSpec | None) -> "Table":
    if model is None:
        return listing_table("--liger", "replaces", rows=((slot.name, slot.title) for slot in SLOTS.values()))
    rows = [
        (slot.name, slot.title, "yes" if inapplicable_reason(slot.name, model) is None else "no")
        for slot in SLOTS.values()
    ]
    applies = f"applies to {model.name}"
    return listing_table("--liger", "replaces", applies, folded=(applies,), rows=rows)


Kind = TypeVar("Kind", TimeRecord, ErrorRecord, HostRecord, MissingRecord)
_Shape = tuple[str, str, str, str]


def bench_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """The object of `ligerprof bench --json`: the same flat records that -o writes as JSON Lines."""
    return document("bench", {"records": [finding.row() for finding in findings]})


def render_bench(findings: Sequence[Finding]) -> "RenderableType":
    """Tables of all findings for a terminal."""
    parts: list[RenderableType] = []
    for heading, table in _tables(findings):
        parts.append(bold(heading))
        parts += [table] if table is not None else []
    return stacked(*parts)


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
    rows = []
    for record in records:
        subject = record.subject
        costs = f"{record.host_seconds * 1e6:.0f}", str(record.synchronizations)
        rows.append((subject.kernel, subject.provider, subject.dtype, *costs))
    return listing_table("kernel", "provider", "dtype", *figures, right=figures, rows=rows)


def _missing_table(records: Sequence[MissingRecord]) -> "Table":
    shapes: dict[tuple[str, str, str], list[str]] = {}
    for record in records:
        subject = record.subject
        shapes.setdefault((subject.kernel, subject.provider, record.reason), []).append(subject.shape)
    rows = [
        (kernel, ", ".join(dict.fromkeys(names)), provider, reason)
        for (kernel, provider, reason), names in shapes.items()
    ]
    return listing_table("kernel", "shapes", "provider", "reason", folded=("shapes", "reason"), rows=rows)


_REMARK = "largest, or why"


def kernel_check_json(check: KernelCheck) -> dict[str, Any]:
    """The object of `ligerprof kernels check --json`; an error beyond all numbers is null, with a note."""
    rows = [{**to_json(row), "error": None if row.error == inf else row.error} for row in check.rows]
    return document("kernel_check", select(check, "kernel", "provider", "slot", "device", "passed"), {"rows": rows})


def render_kernel_check(check: KernelCheck) -> "RenderableType":
    """Lay out the rows, and count them."""
    rows = [
        (
            row.result.upper(),
            row.check,
            f"{row.case}: {row.tensor.replace('_', ' ')}" if row.check == "bytes" and row.tensor else row.case,
            "" if row.error is None else f"{row.error:.1e}",
            "" if row.bound is None else f"{row.bound:.1e}",
            row.note or row.tensor,
        )
        for row in check.rows
    ]
    counts = {result: sum(row.result is result for row in check.rows) for result in Result}
    summary = ", ".join(f"{count} {result}" for result, count in counts.items() if count)
    title = f"kernel {check.kernel} of {check.provider} ({check.device}): {summary}"
    return stacked(
        title, listing_table("result", "check", "case", "error", "bound", _REMARK, folded=("case", _REMARK), rows=rows)
    )
