"""How far estimates and simulations are from the measured peak, in percent, over the size of the peak."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ligerprof.analyzers.estimate import estimated_peak_bytes
from ligerprof.reports.figures.style import RULE, LineLook, new_figure, styled, write_legend, write_title
from ligerprof.roles import Backend
from ligerprof.runs.sweep.cells import Cell, CellStatus
from ligerprof.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_AXES_INCHES = 1.9
_LOOKS = {
    "estimated": LineLook("#0072b2", "o", "", hollow=True, points=5.5),
    "simulated": LineLook("#d55e00", "x", "", points=4),
}
# the least that the axis reaches to either side, so that a thousandth of a percent does not look like an error
_LEAST_PERCENT = 0.1
# from here on even steps would crowd the small ones
_WIDE = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """One figure beside the measured one of the same condition.

    Attributes:
        way: estimated or simulated.
    """

    way: str
    predicted_bytes: int
    measured_bytes: int

    @property
    def error_ratio(self) -> float:
        """Predicted / measured - 1."""
        return self.predicted_bytes / self.measured_bytes - 1


def find_predictions(cells: Iterable[Cell]) -> tuple[Prediction, ...]:
    """Every measured cell that is done, with its closed form and with the simulated cell of the same condition."""
    found = tuple(cells)
    simulated = {repr(cell.recipe.training): cell for cell in found if _backend(cell) is Backend.SIMULATED}
    measured = [cell for cell in found if _backend(cell) is Backend.MEASURED]
    pairs = [("estimated", estimated_peak_bytes(cell.recipe), cell) for cell in measured]
    pairs += [("simulated", _peak_bytes(simulated.get(repr(cell.recipe.training))), cell) for cell in measured]
    return tuple(
        Prediction(way=way, predicted_bytes=predicted_bytes, measured_bytes=measured_bytes)
        for way, predicted_bytes, cell in pairs
        if predicted_bytes is not None and (measured_bytes := _peak_bytes(cell))
    )


def draw_accuracy(predictions: Sequence[Prediction], *sentences: str) -> "Figure":
    """A mark a prediction; how many there are and the worst of them in the legend."""
    with styled():
        figure = new_figure(_AXES_INCHES)
        axes = figure.add_subplot()
        for way, look in _LOOKS.items():
            own = [prediction for prediction in predictions if prediction.way == way]
            if own:
                axes.plot(
                    [prediction.measured_bytes / GIB for prediction in own],
                    [100 * prediction.error_ratio for prediction in own],
                    label=_label(way, own),
                    **look.arguments(),
                )
        axes.axhline(0, color=RULE, linewidth=0.8)
        reach = 1.15 * max([_LEAST_PERCENT, *(100 * abs(prediction.error_ratio) for prediction in predictions)])
        axes.set_ylim(-reach, reach)
        _scale_peaks(axes, [prediction.measured_bytes for prediction in predictions])
        axes.set_xlabel("measured peak, GiB")
        axes.set_ylabel("error, %")
        write_title(figure, *sentences)
        write_legend(figure, columns=1)
    return figure


def _scale_peaks(axes: "Axes", sizes_bytes: Sequence[int]) -> None:
    """Peaks of one size on an even axis, of many sizes on a logarithmic one."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    if max(sizes_bytes) < _WIDE * min(sizes_bytes):
        axes.xaxis.set_major_locator(MaxNLocator(4))
        return
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())


def _backend(cell: Cell) -> Backend | None:
    return cell.figures.backend if cell.status is CellStatus.DONE and cell.figures is not None else None


def _peak_bytes(cell: Cell | None) -> int | None:
    return None if cell is None or cell.figures is None else cell.figures.peak_bytes


def _label(way: str, predictions: Sequence[Prediction]) -> str:
    ratios = [abs(prediction.error_ratio) for prediction in predictions]
    median, worst = statistics.median(ratios), max(ratios)
    return f"{way}: {len(ratios)} steps, median {100 * median:.3f} %, worst {100 * worst:.2f} %"
