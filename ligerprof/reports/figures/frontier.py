"""The frontier of `fit`: the largest batch at each sequence, and the requested pair."""

from typing import TYPE_CHECKING

from ligerprof.analyzers.search.fit import Fit
from ligerprof.recipe.categories import Axis
from ligerprof.reports.figures.series import AXIS_TITLES
from ligerprof.reports.figures.style import LineLook, drawing, mark_sizes
from ligerprof.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_AXES_INCHES = 2.2
_TICKS_INCHES = 2.7
_FRONTIER = LineLook("#0072b2", "o")
_FITS, _LOST = LineLook("#009e73", "*", "", points=9), LineLook("#d55e00", "X", "", points=7)


def draw_frontier(fit: Fit) -> "Figure":
    """Largest batch over tokens per sequence, both on doubling axes, with the requested pair marked."""
    pair = f"{fit.recipe.batch} x {fit.recipe.seq}"
    with drawing(_AXES_INCHES, "The largest batch at each sequence", fit.recipe.summary, columns=1) as figure:
        axes = figure.add_subplot()
        _draw_points(axes, fit)
        look, words = (_FITS, "fits") if fit.wanted.fits else (_LOST, "does not fit")
        axes.plot([fit.recipe.seq], [fit.recipe.batch], label=f"{pair} {words}", zorder=5, **look.arguments())
        axes.set_xlabel(AXIS_TITLES[Axis.SEQ])
        axes.set_ylabel(f"largest {AXIS_TITLES[Axis.BATCH]}")
    return figure


def _draw_points(axes: "Axes", fit: Fit) -> None:
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    mark_sizes(axes, sorted({fit.recipe.seq, *(point.seq for point in fit.frontier)}), width_inches=_TICKS_INCHES)
    if not fit.frontier:
        return
    lengths = [point.seq for point in fit.frontier]
    batches = [point.batch for point in fit.frontier]
    methods = " and ".join(dict.fromkeys(point.verdict.method for point in fit.frontier))
    axes.fill_between(lengths, batches, min(batches), color=_FRONTIER.color, alpha=0.12, linewidth=0)
    axes.plot(lengths, batches, label=f"fits {format_bytes(fit.limit.size_bytes)} ({methods})", **_FRONTIER.arguments())
    for length, batch in zip(lengths, batches, strict=True):
        axes.annotate(f"{batch}", (length, batch), textcoords="offset points", xytext=(4, 3))
