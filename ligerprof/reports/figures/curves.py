"""Peak and throughput of a sweep over batch or sequence: one line per kernel set, a cross where memory runs out."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ligerprof.recipe.categories import Axis
from ligerprof.reports.figures.series import (
    AXIS_TITLES,
    Series,
    Setting,
    describe_origin,
    describe_setting,
    split_series,
)
from ligerprof.reports.figures.style import HALF_PAGE_INCHES, INK, drawing, mark_limit, mark_sizes
from ligerprof.runs.sweep.cells import Cell, CellStatus
from ligerprof.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Quantity = Literal["peak", "throughput"]
VALUE_TITLES: dict[Quantity, str] = {"peak": "peak allocated, GiB", "throughput": "tokens/s"}
_AXES_INCHES = 2.0
# width of the axis title, the tick labels and the figure's edge
_MARGIN_INCHES = 0.7
_CROSS_INCHES = 0.075
_CROSS: dict[str, Any] = {"marker": "x", "linestyle": "", "markersize": 5.5, "markeredgewidth": 1.6, "zorder": 5}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Line:
    """The points of a series.

    Attributes:
        places: sizes along the axis that ran, with their `values`.
        ran_out: the smallest larger size at which memory ran out, or None.
    """

    series: Series
    places: tuple[int, ...]
    values: tuple[float, ...]
    ran_out: int | None

    @property
    def sizes(self) -> tuple[int, ...]:
        """All sizes of the line, including the one that ran out."""
        return self.places if self.ran_out is None else (*self.places, self.ran_out)


def value_of(cell: Cell, quantity: Quantity) -> float | None:
    """Peak in GiB or tokens per second; None if the cell has none."""
    if cell.status is not CellStatus.DONE:
        return None
    if quantity == "throughput":
        return cell.tokens_per_second
    return None if cell.figures is None else cell.figures.peak_bytes / GIB


def draw_curves(setting: Setting, axis: Axis, *quantities: Quantity) -> "Figure":
    """Curves of one setting, half a page wide per quantity, side by side."""
    sizes = curve_sizes(setting, axis)
    # label the sizes of a grid before those of a search for its border
    shared = [size for size, lines in sizes.items() if lines == max(sizes.values())]
    headline = f"{' and '.join(quantities).capitalize()} against {axis if axis is Axis.BATCH else 'sequence'}"
    sentences = f"{headline}, {describe_origin(setting)}", describe_setting(setting, along=(axis,))
    width_inches = len(quantities) * HALF_PAGE_INCHES
    with drawing(_AXES_INCHES, *sentences, width_inches=width_inches, columns=2 * len(quantities)) as figure:
        panels = figure.subplots(1, len(quantities), squeeze=False)[0]
        for axes, quantity in zip(panels, quantities, strict=True):
            _draw_panel(axes, _lines(setting, axis, quantity), setting, quantity)
            axes.set_xlabel(AXIS_TITLES[axis])
            mark_sizes(axes, list(sizes), width_inches=HALF_PAGE_INCHES - _MARGIN_INCHES, first=shared)
    return figure


def curve_sizes(setting: Setting, axis: Axis, quantity: Quantity = "peak") -> dict[int, int]:
    """Sizes with a point or a cross, ascending, with the number of lines at each; empty without a line."""
    counts = Counter(size for line in _lines(setting, axis, quantity) for size in line.sizes)
    return dict(sorted(counts.items()))


def _lines(setting: Setting, axis: Axis, quantity: Quantity) -> list[_Line]:
    """Series with at least two sizes; a single point does not make a line."""
    lines = [_line(series, axis, quantity) for series in split_series(setting, axis)]
    return [line for line in lines if len(line.sizes) > 1]


def _line(series: Series, axis: Axis, quantity: Quantity) -> _Line:
    ran = {getattr(cell.recipe, axis): value_of(cell, quantity) for cell in series.cells}
    values = {place: value for place, value in ran.items() if value is not None}
    lost = [getattr(cell.recipe, axis) for cell in series.cells if cell.status is CellStatus.OOM]
    return _Line(
        series=series,
        places=tuple(values),
        values=tuple(values.values()),
        ran_out=min((place for place in lost if place > max(values, default=0)), default=None),
    )


def _draw_panel(axes: "Axes", lines: Sequence[_Line], setting: Setting, quantity: Quantity) -> None:
    for line in lines:
        axes.plot(line.places, line.values, label=line.series.label, **line.series.look.arguments())
    ended = [line for line in lines if line.ran_out is not None]
    for line in ended:
        _draw_end(axes, line, [other for other in ended if other.ran_out == line.ran_out], quantity)
    if ended:
        axes.plot([], [], **_CROSS, color=INK, label="out of memory")
    heights = [*(value for line in lines for value in line.values), *(_height(line, quantity) for line in ended)]
    limits = {cell.limit_bytes for cell in setting.cells if cell.limit_bytes is not None}
    if quantity == "throughput":
        axes.yaxis.set_major_formatter("{x:,.0f}")
    elif len(limits) == 1:
        heights.append(mark_limit(axes, limits.pop(), " reserved"))
    axes.set_ylabel(VALUE_TITLES[quantity])
    axes.set_ylim(0, 1.06 * max(heights) or 1.0)


def _draw_end(axes: "Axes", line: _Line, neighbors: Sequence[_Line], quantity: Quantity) -> None:
    """A cross at the size that ran out of memory: at the limit, or at zero tokens per second.

    Args:
        neighbors: the lines that end at this size, including this one; their crosses are drawn side by side.
    """
    from matplotlib.transforms import ScaledTranslation

    color, end = line.series.look.color, (line.sizes[-1], _height(line, quantity))
    if line.places:
        xs, ys = zip((line.places[-1], line.values[-1]), end, strict=True)
        axes.plot(xs, ys, color=color, linewidth=0.7, linestyle=(0, (1, 2)))
    shift = _CROSS_INCHES * (neighbors.index(line) - (len(neighbors) - 1) / 2)
    place = axes.transData + ScaledTranslation(shift, 0, axes.figure.dpi_scale_trans)
    axes.plot([end[0]], [end[1]], **_CROSS, clip_on=False, color=color, transform=place)


def _height(line: _Line, quantity: Quantity) -> float:
    limits = [cell.limit_bytes for cell in line.series.cells if cell.status is CellStatus.OOM and cell.limit_bytes]
    return limits[0] / GIB if quantity == "peak" and limits else 0.0
