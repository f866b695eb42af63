"""What each kernel brings alone and what they bring together: peak and throughput against none."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ligerprof.kernels.slots import KERNEL_NAMES
from ligerprof.recipe.categories import Axis
from ligerprof.reports.figures.curves import Quantity, value_of
from ligerprof.reports.figures.series import Setting, describe_origin, describe_setting, split_series
from ligerprof.reports.figures.style import RULE, new_figure, styled, write_title
from ligerprof.runs.sweep.cells import Cell, CellStatus

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BAR_INCHES = 0.19
_TITLES: dict[Quantity, str] = {"peak": "peak allocated, GiB", "throughput": "tokens/s"}
_BAR = {"peak": "#56b4e9", "throughput": "#e69f00"}
_REFERENCE = "#737373"
# a panel's room right of its longest bar, for what it gains: the same inches in one panel as in each of two
_ROOM = {1: 1.25, 2: 1.7}
_SMALLEST_CHANGE = 0.005


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bar:
    """One kernel set.

    Attributes:
        cell: done.
        reference: whether it is the one without kernels.
    """

    label: str
    cell: Cell
    reference: bool


def find_ablation(settings: Sequence[Setting]) -> Setting | None:
    """Of settings at one batch and sequence each, the one with the most kernel sets; of several, the most tokens."""
    able = [setting for setting in settings if len(bars := _bars(setting)) > 1 and any(bar.reference for bar in bars)]
    return max(able, key=lambda setting: (len(_bars(setting)), setting.recipe.tokens), default=None)


def draw_ablation(setting: Setting) -> "Figure":
    """A bar a kernel set, each with its distance from none; throughput where every set has one."""
    bars = _bars(setting)
    timed = all(value_of(bar.cell, "throughput") is not None for bar in bars)
    quantities: list[Quantity] = ["peak", "throughput"] if timed else ["peak"]
    with styled():
        figure = new_figure(0.5 + _BAR_INCHES * len(bars))
        panels = figure.subplots(1, len(quantities), squeeze=False, sharey=True)[0]
        for axes, quantity in zip(panels, quantities, strict=True):
            _draw_panel(axes, bars, quantity, _ROOM[len(quantities)])
        panels[0].set_yticks(range(len(bars)), [bar.label for bar in bars])
        panels[0].invert_yaxis()
        write_title(
            figure, f"Kernels alone and together, {describe_origin(setting)}", describe_setting(setting, along=())
        )
    return figure


def _bars(setting: Setting) -> list[_Bar]:
    """None, each kernel alone, then sets from the smallest to the largest; of one loss, today's where it ran."""
    series = split_series(setting, Axis.BATCH)
    loss = next((one.cells[0].recipe.loss for one in reversed(series) if one.kernels == "none"), None)
    bars = [
        _Bar(label=one.label, cell=cell, reference=one.kernels == "none")
        for one in series
        for cell in one.cells
        if cell.recipe.loss == loss
        if cell.status is CellStatus.DONE and value_of(cell, "peak") is not None
    ]
    return sorted(
        bars, key=lambda bar: (len(names := bar.cell.recipe.kernels), [KERNEL_NAMES.index(name) for name in names])
    )


def _draw_panel(axes: "Axes", bars: Sequence[_Bar], quantity: Quantity, room: float) -> None:
    values = [value_of(bar.cell, quantity) or 0.0 for bar in bars]
    colors = [_REFERENCE if bar.reference else _BAR[quantity] for bar in bars]
    axes.barh(range(len(bars)), values, height=0.72, color=colors)
    base = next(value for value, bar in zip(values, bars, strict=True) if bar.reference)
    axes.axvline(base, color=RULE, linewidth=0.8, linestyle=(0, (1, 1.5)))
    longest = room * max(values)
    for place, (bar, value) in enumerate(zip(bars, values, strict=True)):
        if not bar.reference:
            axes.text(longest, place, _percent(value / base - 1), ha="right", va="center")
    axes.set_xlim(0, longest)
    axes.set_xlabel(_TITLES[quantity])
    axes.tick_params(axis="y", length=0)
    axes.locator_params(axis="x", nbins=3)
    if quantity == "throughput":
        axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(visible=False, axis="y")


def _percent(ratio: float) -> str:
    return f"{100 * ratio:+.0f} %".replace("-", "\N{MINUS SIGN}") if abs(ratio) >= _SMALLEST_CHANGE else "0 %"
