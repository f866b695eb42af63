"""How a bench is shown: tables of times, errors and host costs, and curves with their quantile bands."""

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ligerprof.errors import RecipeError
from ligerprof.reports.figures import STYLE
from ligerprof.reports.listing import listing_table
from ligerprof.runs.bench.floors import Direction
from ligerprof.runs.bench.records import SCHEMA, ErrorRecord, Finding, HostRecord, MissingRecord, Record, TimeRecord
from ligerprof.units import format_mib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import RenderableType
    from rich.table import Table

Kind = TypeVar("Kind", TimeRecord, ErrorRecord, HostRecord, MissingRecord)

_COLORS = {
    "ligerprof": "#1b4f72",
    "liger": "#b9770e",
    "torch": "#797d7f",
    "torch-compile": "#117a65",
    "torch-linear-ce": "#6c3483",
    "cce": "#922b21",
}
_OTHER_COLOR = "#cd6155"
_VARIANT_STYLES = ("-", "--", ":", "-.")
_FIGURE_SUFFIXES = (".png", ".svg", ".pdf")
_NAMED_SIZE = re.compile(r"^(V|T|H)=\d+$")
_AXIS_TITLES = {"V": "vocabulary", "T": "tokens of a sequence", "H": "hidden size"}


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
        line = f"{finding.environment.get('gpu', 'unknown GPU')}: "
        lines[line + ", ".join(f"{name} {text}" for name, text in told.items())] = None
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


def check_figure_name(suffix: str) -> None:
    """Refuse a file that no figure can be written to, before anything is measured.

    Raises:
        RecipeError: the suffix is unknown.
    """
    if suffix not in _FIGURE_SUFFIXES:
        raise RecipeError(
            f"a figure cannot be written as {suffix or 'a file without suffix'!r}. Use .png, .svg or .pdf."
        )


def draw_bench(findings: Sequence[Finding]) -> "Figure":
    """A row of axes a kernel and dtype, one for each direction: medians over shapes in the 20 % to 80 % band."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    times = _of_kind([finding.record for finding in findings], TimeRecord)
    rows = dict.fromkeys((record.subject.kernel, record.subject.dtype) for record in times)
    columns = [direction for direction in Direction if any(record.direction is direction for record in times)]
    with rc_context(fname=STYLE):
        figure = Figure(figsize=(3.6 * max(len(columns), 1), 0.8 + 2.6 * max(len(rows), 1)))
        grid = figure.subplots(max(len(rows), 1), max(len(columns), 1), squeeze=False)
        for row_axes, (kernel, dtype) in zip(grid, rows, strict=False):
            own = [record for record in times if (record.subject.kernel, record.subject.dtype) == (kernel, dtype)]
            for axes, direction in zip(row_axes, columns, strict=True):
                _draw_direction(axes, [record for record in own if record.direction is direction])
                axes.set_title(f"{kernel} {dtype}, {direction.value}")
        _draw_legend(figure)
    return figure


def _draw_legend(figure: "Figure") -> None:
    """One legend for all axes, each label once."""
    entries: dict[str, Any] = {}
    for axes in figure.axes:
        entries |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=4, fontsize=8)


def _draw_direction(axes: "Axes", records: Sequence[TimeRecord]) -> None:
    shapes = list(dict.fromkeys((record.subject.shape, record.subject.sizes) for record in records))
    providers = list(dict.fromkeys(record.subject.provider for record in records))
    for provider in providers:
        own = [record for record in records if record.subject.provider == provider]
        places = [shapes.index((record.subject.shape, record.subject.sizes)) for record in own]
        _draw_band(axes, places, own, color=_color(provider), linestyle=_line_style(provider, providers))
    floors = {(record.subject.shape, record.subject.sizes): record.floor_seconds for record in records}
    floor_places = [place for place, shape in enumerate(shapes) if floors[shape] is not None]
    floor_ms = [1000 * (floors[shapes[place]] or 0.0) for place in floor_places]
    axes.plot(floor_places, floor_ms, color="black", linewidth=0.8, linestyle=(0, (1, 2)), marker="_", label="floor")
    axes.set_ylabel("ms")
    axes.set_ylim(bottom=0)
    _name_shapes(axes, shapes)


def _draw_band(
    axes: "Axes", places: Sequence[int], records: Sequence[TimeRecord], *, color: str, linestyle: str
) -> None:
    medians = [1000 * record.median_seconds for record in records]
    low = [1000 * record.low_seconds for record in records]
    high = [1000 * record.high_seconds for record in records]
    bars = [[median - end for median, end in zip(medians, low, strict=True)]]
    bars.append([end - median for median, end in zip(medians, high, strict=True)])
    label = records[0].subject.provider
    axes.fill_between(places, low, high, color=color, alpha=0.2, linewidth=0)
    # one shape alone has no area: its band is a bar
    axes.errorbar(
        places, medians, yerr=bars, color=color, linestyle=linestyle, marker="o", markersize=3, capsize=2, label=label
    )


def _name_shapes(axes: "Axes", shapes: Sequence[tuple[str, str]]) -> None:
    varied = {name[0] for name, _ in shapes if _NAMED_SIZE.match(name)}
    if len(varied) == 1 and all(_NAMED_SIZE.match(name) for name, _ in shapes):
        axes.set_xlabel(_AXIS_TITLES[varied.pop()])
        labels = [name[2:] for name, _ in shapes]
    else:
        labels = [f"{name}\n{sizes}" for name, sizes in shapes]
    axes.set_xticks(range(len(shapes)), labels, fontsize=7)
    axes.margins(x=0.1)


def _color(provider: str) -> str:
    return _COLORS.get(provider.partition(":")[0], _OTHER_COLOR)


def _line_style(provider: str, providers: Sequence[str]) -> str:
    """Variants of one provider share its color."""
    family = [name for name in providers if name.partition(":")[0] == provider.partition(":")[0]]
    return _VARIANT_STYLES[family.index(provider) % len(_VARIANT_STYLES)]
