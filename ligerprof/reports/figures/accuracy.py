"""Errors of estimates and simulations against the measured peak, in percent, over the size of the peak."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ligerprof.analyzers.estimate import estimated_peak_bytes
from ligerprof.reports.figures.style import RULE, LineLook, drawing
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
# least extent of the axis to either side, so that a thousandth of a percent does not look like an error
_LEAST_PERCENT = 0.1
# ratio of the largest to the smallest peak from which the axis is logarithmic
_WIDE = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """A predicted peak and the measured one of the same condition; `way` is estimated or simulated."""

    way: str
    predicted_bytes: int
    measured_bytes: int

    @property
    def error_ratio(self) -> float:
        """Predicted / measured - 1."""
        return self.predicted_bytes / self.measured_bytes - 1


def find_predictions(cells: Iterable[Cell]) -> tuple[Prediction, ...]:
    """Pair each measured peak with the analytic estimate, and with the simulated cell of the same training."""
    peaks: dict[Backend, list[tuple[Cell, int]]] = {backend: [] for backend in Backend}
    for cell in cells:
        if cell.status is CellStatus.DONE and cell.figures is not None:
            peaks[cell.figures.backend].append((cell, cell.figures.peak_bytes))
    simulated = {repr(cell.recipe.training): peak_bytes for cell, peak_bytes in peaks[Backend.SIMULATED]}
    measured = peaks[Backend.MEASURED]
    found = [("estimated", estimated_peak_bytes(cell.recipe), peak_bytes) for cell, peak_bytes in measured]
    found += [("simulated", simulated.get(repr(cell.recipe.training)), peak_bytes) for cell, peak_bytes in measured]
    return tuple(
        Prediction(way=way, predicted_bytes=predicted_bytes, measured_bytes=measured_bytes)
        for way, predicted_bytes, measured_bytes in found
        if predicted_bytes is not None and measured_bytes
    )


def draw_accuracy(predictions: Sequence[Prediction], *sentences: str) -> "Figure":
    """One mark per prediction; the legend gives their number, the median and the worst."""
    with drawing(_AXES_INCHES, *sentences, columns=1) as figure:
        axes = figure.add_subplot()
        for way, look in _LOOKS.items():
            own = [prediction for prediction in predictions if prediction.way == way]
            if own:
                sizes = [prediction.measured_bytes / GIB for prediction in own]
                errors = [100 * prediction.error_ratio for prediction in own]
                axes.plot(sizes, errors, label=_label(way, [abs(error) for error in errors]), **look.arguments())
        axes.axhline(0, color=RULE, linewidth=0.8)
        reach = 1.15 * max([_LEAST_PERCENT, *(100 * abs(prediction.error_ratio) for prediction in predictions)])
        axes.set_ylim(-reach, reach)
        _scale_peaks(axes, [prediction.measured_bytes for prediction in predictions])
        axes.set_xlabel("measured peak, GiB")
        axes.set_ylabel("error, %")
    return figure


def _label(way: str, percents: Sequence[float]) -> str:
    median, worst = statistics.median(percents), max(percents)
    return f"{way}: {len(percents)} steps, median {median:.3f} %, worst {worst:.2f} %"


def _scale_peaks(axes: "Axes", sizes_bytes: Sequence[int]) -> None:
    """A linear axis for peaks of similar size, a logarithmic one for others."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    if max(sizes_bytes) < _WIDE * min(sizes_bytes):
        axes.xaxis.set_major_locator(MaxNLocator(4))
        return
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
