"""Peak and throughput of each kernel alone and of all together, compared with no kernels."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ligerprof.kernels.slots import KERNEL_NAMES
from ligerprof.recipe.categories import Axis
from ligerprof.reports.figures.curves import VALUE_TITLES, Quantity, value_of
from ligerprof.reports.figures.series import Setting, describe_origin, describe_setting, split_series
from ligerprof.reports.figures.style import RULE, drawing
from ligerprof.runs.sweep.cells import Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BAR_INCHES = 0.19
_COLORS: dict[Quantity, str] = {"peak": "#56b4e9", "throughput": "#e69f00"}
_REFERENCE_COLOR = "#737373"
# space to the right of the longest bar, as a multiple of its length, for the change: the same inches in one panel as in
# each of two
_ROOM = {1: 1.25, 2: 1.7}
_SMALLEST_CHANGE = 0.005


# label and cell of one kernel set
_Bar = tuple[str, Cell]


def find_ablation(settings: Sequence[Setting]) -> Setting | None:
    """The setting with the most kernel sets, then the most tokens; each setting has one batch and one sequence."""
    able = [setting for setting in settings if len(bars := _bars(setting)) > 1 and any(map(_is_reference, bars))]
    return max(able, key=lambda setting: (len(_bars(setting)), setting.recipe.tokens), default=None)


def draw_ablation(setting: Setting) -> "Figure":
    """One bar per kernel set, with its change from no kernels; throughput only if every set has one."""
    bars = _bars(setting)
    timed = all(value_of(cell, "throughput") is not None for _, cell in bars)
    quantities: list[Quantity] = ["peak", "throughput"] if timed else ["peak"]
    sentence = f"Kernels alone and together, {describe_origin(setting)}"
    with drawing(0.5 + _BAR_INCHES * len(bars), sentence, describe_setting(setting, along=())) as figure:
        panels = figure.subplots(1, len(quantities), squeeze=False, sharey=True)[0]
        for axes, quantity in zip(panels, quantities, strict=True):
            _draw_panel(axes, bars, quantity, _ROOM[len(quantities)])
        panels[0].set_yticks(range(len(bars)), [label for label, _ in bars])
        panels[0].invert_yaxis()
    return figure


def _bars(setting: Setting) -> list[_Bar]:
    """No kernels, each kernel alone, then the sets by size; with several losses, those of the current one if it ran."""
    series = split_series(setting, Axis.BATCH)
    loss = next((one.cells[0].recipe.loss for one in reversed(series) if one.kernels == "none"), None)
    bars = [
        (one.label, cell)
        for one in series
        for cell in one.cells
        if cell.recipe.loss == loss and value_of(cell, "peak") is not None
    ]
    return sorted(bars, key=lambda bar: (len(bar[1].recipe.kernels), [*map(KERNEL_NAMES.index, bar[1].recipe.kernels)]))


def _is_reference(bar: _Bar) -> bool:
    return not bar[1].recipe.kernels


def _draw_panel(axes: "Axes", bars: Sequence[_Bar], quantity: Quantity, room: float) -> None:
    values = [value_of(cell, quantity) or 0.0 for _, cell in bars]
    colors = [_REFERENCE_COLOR if _is_reference(bar) else _COLORS[quantity] for bar in bars]
    axes.barh(range(len(bars)), values, height=0.72, color=colors)
    base = next(value for value, bar in zip(values, bars, strict=True) if _is_reference(bar))
    axes.axvline(base, color=RULE, linewidth=0.8, linestyle=(0, (1, 1.5)))
    longest = room * max(values)
    for place, (bar, value) in enumerate(zip(bars, values, strict=True)):
        if not _is_reference(bar):
            axes.text(longest, place, _percent(value / base - 1), ha="right", va="center")
    axes.set_xlim(0, longest)
    axes.set_xlabel(VALUE_TITLES[quantity])
    axes.tick_params(axis="y", length=0)
    axes.locator_params(axis="x", nbins=3)
    if quantity == "throughput":
        axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(visible=False, axis="y")


def _percent(ratio: float) -> str:
    return f"{100 * ratio:+.0f} %".replace("-", "\N{MINUS SIGN}") if abs(ratio) >= _SMALLEST_CHANGE else "0 %"
