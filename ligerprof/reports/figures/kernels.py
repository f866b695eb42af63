"""Times of kernels from bench records: medians with their 20 % to 80 % band, one look per provider."""

import dataclasses
import re
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ligerprof.reports.figures.style import HALF_PAGE_INCHES, INK, LineLook, drawing
from ligerprof.runs.bench.records import Direction, Finding, TimeRecord

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
# share of the space between two named shapes that their points take
_SPREAD = 0.7
_Place = tuple[str, str, str]


def _row_of(record: TimeRecord) -> _Place:
    """Kernel, dtype, and the size that its shapes vary (empty for named shapes)."""
    varied = _NAMED_SIZE.match(record.subject.shape)
    return record.subject.kernel, record.subject.dtype, varied.group(1) if varied else ""


def _place(record: TimeRecord) -> _Place:
    """Kernel, shape and sizes."""
    return record.subject.kernel, record.subject.shape, record.subject.sizes


def _look(provider: str, providers: Sequence[str]) -> LineLook:
    """The look of a provider; its variants share the color."""
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


def draw_bench(findings: Sequence[Finding]) -> "Figure":
    """Every record on one sheet: one column per direction, one row per kernel, dtype and kind of shapes."""
    times = [finding.record for finding in findings if isinstance(finding.record, TimeRecord)]
    rows = list(dict.fromkeys(map(_row_of, times)))
    columns = [direction for direction in Direction if any(record.direction is direction for record in times)]
    width = max(len(columns), 1)
    height_inches, width_inches = 2.2 * max(len(rows), 1), HALF_PAGE_INCHES * width
    with drawing(height_inches, width_inches=width_inches, columns=2 * width) as figure:
        grid = figure.subplots(max(len(rows), 1), width, squeeze=False)
        for row_axes, row in zip(grid, rows, strict=False):
            for axes, direction in zip(row_axes, columns, strict=True):
                _draw_times(axes, [item for item in times if _row_of(item) == row and item.direction is direction])
                axes.set_title(f"{row[0]} {row[1]}, {direction.value}")
    return figure


def _draw_times(axes: "Axes", records: Sequence[TimeRecord]) -> None:
    """Curves over a size that varies, or points side by side for named shapes."""
    if not records:
        axes.set_axis_off()
        return
    shapes = list(dict.fromkeys(map(_place, records)))
    providers = list(dict.fromkeys(record.subject.provider for record in records))
    varied = _row_of(records[0])[2]
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
    elif len(shapes) <= 3:
        axes.set_xticks(range(len(shapes)), [_tick(name, sizes) for _, name, sizes in shapes])
    else:
        # without their sizes, upright: more than three labels have no room side by side
        axes.set_xticks(range(len(shapes)), [name for _, name, _ in shapes], rotation=90)


def _tick(name: str, sizes: str) -> str:
    """A named shape with its sizes below, wrapped to a third of a column."""
    lines = textwrap.wrap(sizes.replace("x", "x "), 12, break_long_words=False, break_on_hyphens=False)
    return "\n".join([name, *(line.replace(" ", "") for line in lines)])


def _draw_band(axes: "Axes", places: Sequence[float], records: Sequence[TimeRecord], look: LineLook) -> None:
    low, medians, high = (
        1000 * np.array([getattr(record, name) for record in records])
        for name in ("low_seconds", "median_seconds", "high_seconds")
    )
    ends = [medians - low, high - medians]
    axes.errorbar(places, medians, yerr=ends, capsize=2, label=records[0].subject.provider, **look.arguments())
    if look.dashes:
        axes.fill_between(places, low, high, color=look.color, alpha=0.2, linewidth=0)


def _draw_floor(axes: "Axes", shapes: Sequence[_Place], records: Sequence[TimeRecord], *, curve: bool) -> None:
    seconds = {_place(record): record.floor_seconds for record in records}
    places = [place for place, shape in enumerate(shapes) if seconds[shape] is not None]
    values = [1000 * (seconds[shapes[place]] or 0.0) for place in places]
    if curve:
        axes.plot(places, values, **_FLOOR)
    elif places:
        starts, stops = ([place + side * _SPREAD / 2 for place in places] for side in (-1, 1))
        axes.hlines(values, starts, stops, **_FLOOR)
