"""Time and memory of kernels from bench records: medians with their 20 % to 80 % band, a look a provider."""

import dataclasses
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ligerprof.reports.figures.style import INK, LineLook, new_figure, styled, write_legend, write_title
from ligerprof.runs.bench.records import Direction, Finding, TimeRecord
from ligerprof.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOOKS = {
    "ligerprof": LineLook("#d55e00", "D", points=4),
    "liger": LineLook("#0072b2", "s", (0, (5, 1.5))),
    "torch": LineLook("#737373", "o", (0, (1, 1.2))),
    "torch-compile": LineLook("#009e73", "^", (0, (3, 1, 1, 1)), points=5),
    "torch-linear-ce": LineLook("#7a5195", "P", (0, (7, 1)), points=5),
    "cce": LineLook("#000000", "v", (0, (3, 1)), points=5),
}
_OTHER_LOOK = LineLook("#8a6d00", "X", (0, (2, 2)), points=5)
_VARIANT_DASHES = ((0.0, (4.0, 1.0)), (0.0, (1.0, 1.5)), (0.0, (4.0, 1.0, 1.0, 1.0)), (0.0, (8.0, 1.5)))
_VARIANT_MARKERS = ("s", "^", "v", "o", "P", "X")
_FLOOR: dict[str, Any] = {"color": INK, "linewidth": 0.8, "linestyle": (0, (1, 2)), "label": "floor"}
_NAMED_SIZE = re.compile(r"^(V|T|H)=\d+$")
_AXIS_TITLES = {"V": "vocabulary, entries", "T": "sequence, tokens", "H": "hidden size, elements"}
_ROW_INCHES = 0.17
_CURVES_INCHES = 1.7
_COLUMN_INCHES = 3.4
_HEADROOM = 1.04
# a third of a column, for three named shapes side by side; of more of them the names alone have room, on end
_TICK_LETTERS = 12
_SHAPES_WITH_SIZES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelFigure:
    """Records that one figure shows: curves over a size that varies, or blocks of providers, one a shape.

    Attributes:
        name: of the file.
        varied: V, T or H, "" where shapes have only names.
    """

    name: str
    title: str
    varied: str
    records: tuple[TimeRecord, ...]


def find_kernel_figures(findings: Sequence[Finding]) -> tuple[KernelFigure, ...]:
    """Whole passes (forward and backward), a figure for each kernel, dtype and size that varies.

    Kernels that were timed at one named shape only share a figure.
    """
    whole = [record for record in _times(findings) if record.direction is Direction.FULL]
    groups: dict[tuple[str, str, str], list[TimeRecord]] = {}
    for record in whole:
        groups.setdefault(row_of(record), []).append(record)
    alone = {key: members for key, members in groups.items() if key[2] or len(_shapes(members)) > 1}
    figures = [
        KernelFigure(
            name="-".join(filter(None, (*key[:2], key[2].lower()))),
            title=f"{key[0]} in {key[1]}, forward and backward",
            varied=key[2],
            records=tuple(members),
        )
        for key, members in alone.items()
    ]
    rest = tuple(record for key, members in groups.items() if key not in alone for record in members)
    if rest:
        figures.append(KernelFigure(name="others", title="Kernels, forward and backward", varied="", records=rest))
    return tuple(figures)


def draw_kernels(figure: KernelFigure, *sentences: str) -> "Figure":
    """Time beside extra peak memory of every provider."""
    with styled():
        drawn = _draw_curves(figure) if figure.varied else _draw_blocks(figure)
        write_title(drawn, figure.title, *sentences)
        write_legend(drawn)
    return drawn


def describe_machines(findings: Sequence[Finding]) -> str:
    """The GPUs that were measured."""
    gpus = dict.fromkeys(finding.environment.get("gpu", "an unknown GPU") for finding in findings)
    return f"measured on {', '.join(gpus)}; bars and bands from the 20 % to the 80 % quantile"


def _times(findings: Sequence[Finding]) -> list[TimeRecord]:
    return [finding.record for finding in findings if isinstance(finding.record, TimeRecord)]


def row_of(record: TimeRecord) -> tuple[str, str, str]:
    """Kernel, dtype, and the size that its shapes vary (empty for named shapes)."""
    varied = _NAMED_SIZE.match(record.subject.shape)
    return record.subject.kernel, record.subject.dtype, varied.group(1) if varied else ""


def _shapes(records: Sequence[TimeRecord]) -> list[tuple[str, str, str]]:
    """Kernel, shape and sizes, each once, in order."""
    return list(
        dict.fromkeys((record.subject.kernel, record.subject.shape, record.subject.sizes) for record in records)
    )


def _place(record: TimeRecord) -> tuple[str, str, str]:
    return record.subject.kernel, record.subject.shape, record.subject.sizes


def _look(provider: str, providers: Sequence[str]) -> LineLook:
    """One look a provider; its variants share the colour."""
    family, _, variant = provider.partition(":")
    look = _LOOKS.get(family, _OTHER_LOOK)
    if not variant:
        return look
    variants = sorted({name for name in providers if name.startswith(f"{family}:")})
    number = variants.index(provider)
    return dataclasses.replace(
        look,
        dashes=_VARIANT_DASHES[number % len(_VARIANT_DASHES)],
        marker=_VARIANT_MARKERS[number % len(_VARIANT_MARKERS)],
        hollow=True,
    )


def _providers(records: Sequence[TimeRecord]) -> list[str]:
    return list(dict.fromkeys(record.subject.provider for record in records))


def _draw_blocks(figure: KernelFigure) -> "Figure":
    """A block a shape, a row a provider, the fastest at the top; time at the left, memory at the right."""
    shapes = _shapes(figure.records)
    blocks = [[record for record in figure.records if _place(record) == shape] for shape in shapes]
    heights = [0.55 + _ROW_INCHES * len(block) for block in blocks]
    drawn = new_figure(sum(heights) + 0.3)
    panels = drawn.subplots(len(blocks), 2, squeeze=False, sharey="row", height_ratios=heights)
    for (left, right), shape, block in zip(panels, shapes, blocks, strict=True):
        rows = sorted(block, key=lambda record: record.median_seconds)
        _draw_rows(left, right, rows)
        left.set_title(f"{shape[0]} {shape[1]}, {shape[2]}")
    panels[-1][0].set_xlabel("ms")
    panels[-1][1].set_xlabel("extra peak, GiB")
    return drawn


def _draw_rows(left: "Axes", right: "Axes", rows: Sequence[TimeRecord]) -> None:
    providers = _providers(rows)
    for place, record in enumerate(rows):
        look = dataclasses.replace(_look(record.subject.provider, providers), dashes="")
        median = 1000 * record.median_seconds
        ends = [[median - 1000 * record.low_seconds], [1000 * record.high_seconds - median]]
        left.errorbar([median], [place], xerr=ends, capsize=2, **look.arguments())
        if record.extra_peak_bytes is not None:
            right.plot([record.extra_peak_bytes / GIB], [place], clip_on=False, **look.arguments())
    floors = {record.floor_seconds for record in rows if record.floor_seconds is not None}
    for floor in sorted(floors)[:1]:
        left.axvline(1000 * floor, **_FLOOR)
    left.set_yticks(range(len(rows)), [record.subject.provider for record in rows])
    left.set_ylim(len(rows) - 0.4, -0.6)
    for axes in (left, right):
        axes.set_xlim(0, _HEADROOM * axes.get_xlim()[1])
        axes.locator_params(axis="x", nbins=4)
        axes.tick_params(axis="y", length=0)
        axes.xaxis.set_major_formatter("{x:,g}")


def _draw_curves(figure: KernelFigure) -> "Figure":
    """Time above, memory below, over the size that varies."""
    drawn = new_figure(2 * _CURVES_INCHES)
    upper, lower = drawn.subplots(2, 1, sharex=True)
    _draw_times(upper, figure.records)
    providers = _providers(figure.records)
    shapes = _shapes(figure.records)
    for provider in providers:
        own = [
            record
            for record in figure.records
            if record.subject.provider == provider and record.extra_peak_bytes is not None
        ]
        places = [shapes.index(_place(record)) for record in own]
        sizes = [(record.extra_peak_bytes or 0) / GIB for record in own]
        lower.plot(places, sizes, label=provider, **_look(provider, providers).arguments())
    upper.set_xlabel("")
    lower.set_ylabel("extra peak, GiB")
    lower.set_ylim(bottom=0)
    lower.set_xlabel(_AXIS_TITLES[figure.varied])
    return drawn


def draw_bench(findings: Sequence[Finding]) -> "Figure":
    """Every record on one sheet: a column each direction, a row each kernel, dtype and kind of shapes."""
    times = _times(findings)
    rows = list(dict.fromkeys(row_of(record) for record in times)) or [("", "", "")]
    columns = [direction for direction in Direction if any(record.direction is direction for record in times)]
    with styled():
        width = _COLUMN_INCHES * max(len(columns), 1)
        figure = new_figure(2.2 * len(rows), width_inches=width)
        grid = figure.subplots(len(rows), max(len(columns), 1), squeeze=False)
        for row_axes, row in zip(grid, rows, strict=True):
            for axes, direction in zip(row_axes, columns, strict=False):
                _draw_times(axes, [item for item in times if row_of(item) == row and item.direction is direction])
                axes.set_title(f"{row[0]} {row[1]}, {direction.value}")
        write_legend(figure, columns=2 * max(len(columns), 1))
    return figure


def _draw_times(axes: "Axes", records: Sequence[TimeRecord]) -> None:
    """Curves over a size that varies, or points side by side for shapes that have only names."""
    if not records:
        axes.set_axis_off()
        return
    shapes, providers = _shapes(records), _providers(records)
    varied = row_of(records[0])[2]
    for number, provider in enumerate(providers):
        own = [record for record in records if record.subject.provider == provider]
        shift = 0.0 if varied else _SPREAD * ((number + 0.5) / len(providers) - 0.5)
        look = _look(provider, providers)
        places = [shapes.index(_place(record)) + shift for record in own]
        _draw_band(axes, places, own, look if varied else dataclasses.replace(look, dashes=""))
    _draw_floor(axes, shapes, records, curve=bool(varied))
    axes.set_ylabel("ms")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(_AXIS_TITLES.get(varied, ""))
    if varied:
        axes.set_xticks(range(len(shapes)), [name[2:] for _, name, _ in shapes])
    elif len(shapes) <= _SHAPES_WITH_SIZES:
        axes.set_xticks(range(len(shapes)), [_tick(name, sizes) for _, name, sizes in shapes])
    else:
        axes.set_xticks(range(len(shapes)), [name for _, name, _ in shapes], rotation=90)


def _tick(name: str, sizes: str) -> str:
    """A named shape with its sizes below, on as many lines as keep it beside the next one."""
    words = sizes.replace("x", "x ")
    lines = textwrap.wrap(words, _TICK_LETTERS, break_long_words=False, break_on_hyphens=False)
    return "\n".join([name, *(line.replace(" ", "") for line in lines)])


# how much of the place between two named shapes their points take
_SPREAD = 0.7


def _draw_band(axes: "Axes", places: Sequence[float], records: Sequence[TimeRecord], look: LineLook) -> None:
    medians = [1000 * record.median_seconds for record in records]
    low = [1000 * record.low_seconds for record in records]
    high = [1000 * record.high_seconds for record in records]
    ends = [
        [median - end for median, end in zip(medians, low, strict=True)],
        [end - median for median, end in zip(medians, high, strict=True)],
    ]
    axes.errorbar(places, medians, yerr=ends, capsize=2, label=records[0].subject.provider, **look.arguments())
    if look.dashes:
        axes.fill_between(places, low, high, color=look.color, alpha=0.2, linewidth=0)


def _draw_floor(
    axes: "Axes", shapes: Sequence[tuple[str, str, str]], records: Sequence[TimeRecord], *, curve: bool
) -> None:
    seconds = {_place(record): record.floor_seconds for record in records}
    places = [place for place, shape in enumerate(shapes) if seconds[shape] is not None]
    values = [1000 * (seconds[shapes[place]] or 0.0) for place in places]
    if curve:
        axes.plot(places, values, **_FLOOR)
    elif places:
        starts, stops = ([place + side * _SPREAD / 2 for place in places] for side in (-1, 1))
        axes.hlines(values, starts, stops, **_FLOOR)
