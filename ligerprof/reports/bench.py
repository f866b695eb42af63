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
_MARKERS = ("s", "^", "v", "D", "P", "X")
# how much of the place between two named shapes their points take
_SPREAD = 0.7
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
    """Medians in their 20 % to 80 % band: a column each direction, a row each kernel, dtype and kind of shapes."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    times = _of_kind([finding.record for finding in findings], TimeRecord)
    rows = list(dict.fromkeys(_row_of(record) for record in times)) or [("", "", "")]
    columns = [direction for direction in Direction if any(record.direction is direction for record in times)]
    with rc_context(fname=STYLE):
        figure = Figure(figsize=(4.4 * max(len(columns), 1), 0.8 + 2.6 * len(rows)))
        grid = figure.subplots(len(rows), max(len(columns), 1), squeeze=False)
        for row_axes, row in zip(grid, rows, strict=True):
            for axes, direction in zip(row_axes, columns, strict=False):
                _draw_cell(axes, [item for item in times if _row_of(item) == row and item.direction is direction])
                axes.set_title(f"{row[0]} {row[1]}, {direction.value}")
        _draw_legend(figure)
    return figure


def _row_of(record: TimeRecord) -> tuple[str, str, str]:
    """Kernel, dtype, and the size that its shapes vary (empty for named shapes)."""
    varied = _NAMED_SIZE.match(record.subject.shape)
    return record.subject.kernel, record.subject.dtype, varied.group(1) if varied else ""


def _draw_legend(figure: "Figure") -> None:
    """One legend for all axes, each label once."""
    entries: dict[str, Any] = {}
    for axes in figure.axes:
        entries |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if entries:
        figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=4, fontsize=8)


def _draw_cell(axes: "Axes", records: Sequence[TimeRecord]) -> None:
    """Curves over a size that varies, or points side by side for shapes that have only names."""
    if not records:
        axes.set_axis_off()
        return
    shapes = list(dict.fromkeys((record.subject.shape, record.subject.sizes) for record in records))
    providers = list(dict.fromkeys(record.subject.provider for record in records))
    varied = _row_of(records[0])[2]
    for number, provider in enumerate(providers):
        own = [record for record in records if record.subject.provider == provider]
        shift = 0.0 if varied else _SPREAD * ((number + 0.5) / len(providers) - 0.5)
        places = [shapes.index((record.subject.shape, record.subject.sizes)) + shift for record in own]
        line = _line_style(provider, providers) if varied else ""
        _draw_band(axes, places, own, color=_color(provider), linestyle=line)
    _draw_floor(axes, shapes, records, curve=bool(varied))
    axes.set_ylabel("ms")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(_AXIS_TITLES.get(varied, ""))
    axes.set_xticks(
        range(len(shapes)), [name[2:] if varied else f"{name}\n{sizes}" for name, sizes in shapes], fontsize=6.5
    )


def _draw_band(
    axes: "Axes", places: Sequence[float], records: Sequence[TimeRecord], *, color: str, linestyle: str
) -> None:
    medians = [1000 * record.median_seconds for record in records]
    low = [1000 * record.low_seconds for record in records]
    high = [1000 * record.high_seconds for record in records]
    ends = [
        [median - end for median, end in zip(medians, low, strict=True)],
        [end - median for median, end in zip(medians, high, strict=True)],
    ]
    style: dict[str, Any] = {
        "color": color,
        "linestyle": linestyle,
        "marker": _marker(records[0].subject.provider),
        "markersize": 3,
    }
    axes.errorbar(places, medians, yerr=ends, capsize=2, label=records[0].subject.provider, **style)
    if linestyle:
        axes.fill_between(places, low, high, color=color, alpha=0.2, linewidth=0)


def _draw_floor(axes: "Axes", shapes: Sequence[tuple[str, str]], records: Sequence[TimeRecord], *, curve: bool) -> None:
    seconds = {(record.subject.shape, record.subject.sizes): record.floor_seconds for record in records}
    places = [place for place, shape in enumerate(shapes) if seconds[shape] is not None]
    values = [1000 * (seconds[shapes[place]] or 0.0) for place in places]
    if curve:
        axes.plot(places, values, color="black", linewidth=0.8, linestyle=(0, (1, 2)), label="floor")
    elif places:
        starts, stops = ([place + side * _SPREAD / 2 for place in places] for side in (-1, 1))
        axes.hlines(values, starts, stops, color="black", linewidth=0.8, linestyle=(0, (1, 2)), label="floor")


def _color(provider: str) -> str:
    return _COLORS.get(provider.partition(":")[0], _OTHER_COLOR)


def _marker(provider: str) -> str:
    """Plain providers are round; variants differ by their own name, the same in every cell."""
    variant = provider.partition(":")[2]
    return _MARKERS[sum(map(ord, variant)) % len(_MARKERS)] if variant else "o"


def _line_style(provider: str, providers: Sequence[str]) -> str:
    """Variants of one provider share its color."""
    family = [name for name in providers if name.partition(":")[0] == provider.partition(":")[0]]
    return _VARIANT_STYLES[family.index(provider) % len(_VARIANT_STYLES)]
