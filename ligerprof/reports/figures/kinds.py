"""The kinds of figures: what each shows, what it is drawn from, and which line says so where that is missing."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ligerprof.errors import LigerprofError
from ligerprof.recipe.categories import Axis
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.reports.figures.ablation import draw_ablation, find_ablation
from ligerprof.reports.figures.accuracy import draw_accuracy, find_predictions
from ligerprof.reports.figures.curves import Quantity, curve_sizes, draw_curves
from ligerprof.reports.figures.kernels import describe_machines, draw_kernels, find_kernel_figures
from ligerprof.reports.figures.layers import draw_layers, layer_breakdowns
from ligerprof.reports.figures.memory import Recording, draw_memory, has_step
from ligerprof.reports.figures.planes import draw_planes
from ligerprof.reports.figures.roles import draw_roles, find_bars
from ligerprof.reports.figures.series import (
    Setting,
    describe_origin,
    describe_setting,
    name_settings,
    split_settings,
)
from ligerprof.reports.figures.sources import Sources

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# where the closed form is asked for planes: doublings, which a doubling axis shows evenly
_BATCHES = tuple(2**power for power in range(8))
_SEQUENCES = tuple(2**power for power in range(9, 16))


@dataclass(frozen=True, kw_only=True, slots=True)
class PlotInput:
    """What figures are drawn from.

    Attributes:
        recipe: for what the closed form alone can draw; None draws none of it.
        sizes: at which it is asked.
    """

    sources: Sources = field(default_factory=Sources)
    recipe: TrainingRecipe | None = None
    sizes: Mapping[Axis, Sequence[int]] = field(default_factory=lambda: {Axis.BATCH: _BATCHES, Axis.SEQ: _SEQUENCES})


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """A figure and the name of its file, without a suffix."""

    name: str
    figure: "Figure"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One kind of figure.

    Attributes:
        shows: in a line, for help and docs.
        needs: what it is drawn from, for the line that says what is missing.
        draw: yields nothing where that is not there.
    """

    shows: str
    needs: str
    draw: Callable[[PlotInput], Iterator[Drawn]]


class NothingToDrawError(LigerprofError):
    """A kind of figure that the given data do not allow."""


def draw(name: str, given: PlotInput) -> tuple[Drawn, ...]:
    """Every figure of a kind that the data allow, at least one.

    Raises:
        NothingToDrawError: they allow none; the message says what is missing.
    """
    kind = KINDS[name]
    drawn = tuple(kind.draw(given))
    if not drawn:
        raise NothingToDrawError(f"{name}: nothing to draw. It needs {kind.needs}.")
    return drawn


def _curves(axis: Axis, *quantities: Quantity) -> Callable[[PlotInput], Iterator[Drawn]]:
    name = f"{quantities[0]}-{axis}" if len(quantities) == 1 else axis

    def drawn(given: PlotInput) -> Iterator[Drawn]:
        settings = [
            setting
            for setting in split_settings(given.sources.cells, along=(axis,))
            if all(_has_line(setting, axis, quantity) for quantity in quantities)
        ]
        for setting, words in zip(settings, name_settings(settings, along=(axis,)), strict=True):
            yield Drawn(name=_file_name(name, words), figure=draw_curves(setting, axis, *quantities))

    return drawn


def _has_line(setting: Setting, axis: Axis, quantity: Quantity) -> bool:
    return bool(curve_sizes(setting, axis, quantity))


def _file_name(*parts: str) -> str:
    return "-".join(filter(None, parts))


def _ablation(given: PlotInput) -> Iterator[Drawn]:
    setting = find_ablation(split_settings(given.sources.cells, along=()))
    if setting is not None:
        yield Drawn(name="ablation", figure=draw_ablation(setting))


def _roles(given: PlotInput) -> Iterator[Drawn]:
    """Bars along batch and along sequence; where neither varies, of the kernel sets alone."""
    drawn = [one for axis in Axis for one in _bars_along(given, axis)]
    yield from drawn or _bars_along(given, None)


def _bars_along(given: PlotInput, axis: Axis | None) -> Iterator[Drawn]:
    along = (axis,) if axis is not None else ()
    settings = split_settings(given.sources.cells, along=along)
    found = [(setting, find_bars(setting, axis or Axis.BATCH)) for setting in settings]
    chosen = [(setting, bars) for setting, bars in found if len({bar.group for bar in bars}) > (axis is not None)]
    names = name_settings([setting for setting, _ in chosen], along=along)
    for (setting, bars), words in zip(chosen, names, strict=True):
        sentences = f"Who holds the peak, {describe_origin(setting)}", describe_setting(setting, along=along)
        yield Drawn(name=_file_name("roles", axis or "", words), figure=draw_roles(bars, *sentences))


def _accuracy(given: PlotInput) -> Iterator[Drawn]:
    predictions = find_predictions(given.sources.cells)
    gpus = dict.fromkeys(cell.gpu for cell in given.sources.cells if cell.gpu)
    if predictions:
        sentence = f"Predicted peaks against those measured on {', '.join(gpus)}"
        yield Drawn(name="accuracy", figure=draw_accuracy(predictions, sentence))


def _memory(given: PlotInput) -> Iterator[Drawn]:
    recordings = []
    for title, source in zip(given.sources.titles, given.sources.snapshots, strict=True):
        timeline = source.analysis.timeline
        if has_step(timeline):
            recordings.append(Recording(title=title, timeline=timeline))
    if recordings:
        yield Drawn(name="memory", figure=draw_memory(recordings, f"Memory over one step{_origins(given)}"))


def _layers(given: PlotInput) -> Iterator[Drawn]:
    sources = given.sources
    explained = [(title, one, one.analysis.peak) for title, one in zip(sources.titles, sources.snapshots, strict=True)]
    found = [(title, one, report) for title, one, report in explained if layer_breakdowns(report)]
    for number, (title, one, report) in enumerate(found, start=1):
        sentence = ", ".join(filter(None, (f"The peak layer by layer: {title}", one.origin)))
        name = _file_name("layers", str(number) if len(found) > 1 else "")
        yield Drawn(name=name, figure=draw_layers(report, sentence))


def _origins(given: PlotInput) -> str:
    words = dict.fromkeys(source.origin for source in given.sources.snapshots if source.origin)
    return f", {' and '.join(words)}" if words else ""


def _kernels(given: PlotInput) -> Iterator[Drawn]:
    for one in find_kernel_figures(given.sources.findings):
        yield Drawn(
            name=_file_name("kernels", one.name), figure=draw_kernels(one, describe_machines(given.sources.findings))
        )


def _planes(given: PlotInput) -> Iterator[Drawn]:
    if given.recipe is not None:
        yield Drawn(name="planes", figure=draw_planes(given.recipe, given.sizes))


OF_A_RECIPE = "planes"
_A_SWEEP = "cells that ran at two {} or more, all else but the kernels equal"
_TIMED = f"{_A_SWEEP}, with times: simulated steps have none"

KINDS: Mapping[str, Kind] = {
    "batch": Kind(
        shows="Peak and throughput against batch, side by side, a page wide.",
        needs=_TIMED.format("batches"),
        draw=_curves(Axis.BATCH, "peak", "throughput"),
    ),
    "seq": Kind(
        shows="Peak and throughput against sequence, side by side, a page wide.",
        needs=_TIMED.format("sequences"),
        draw=_curves(Axis.SEQ, "peak", "throughput"),
    ),
    "peak-batch": Kind(
        shows="Peak against batch, a line a kernel set.",
        needs=_A_SWEEP.format("batches"),
        draw=_curves(Axis.BATCH, "peak"),
    ),
    "peak-seq": Kind(
        shows="Peak against sequence, a line a kernel set.",
        needs=_A_SWEEP.format("sequences"),
        draw=_curves(Axis.SEQ, "peak"),
    ),
    "throughput-batch": Kind(
        shows="Tokens a second against batch.",
        needs=_TIMED.format("batches"),
        draw=_curves(Axis.BATCH, "throughput"),
    ),
    "throughput-seq": Kind(
        shows="Tokens a second against sequence.",
        needs=_TIMED.format("sequences"),
        draw=_curves(Axis.SEQ, "throughput"),
    ),
    "ablation": Kind(
        shows="Kernels alone and together against none.",
        needs="cells of two kernel sets or more, none among them, all else equal",
        draw=_ablation,
    ),
    "roles": Kind(
        shows="Who holds the peak, bars side by side.",
        needs="cells that are done",
        draw=_roles,
    ),
    "accuracy": Kind(
        shows="Estimated and simulated peaks against measured ones, in percent.",
        needs="measured cells that are done",
        draw=_accuracy,
    ),
    "memory": Kind(
        shows="Memory over one step by role; several recordings on one axis.",
        needs="a memory snapshot or a run directory with a whole step in it",
        draw=_memory,
    ),
    "layers": Kind(
        shows="The peak layer by layer.",
        needs="a memory snapshot or a run directory in which layers can be told",
        draw=_layers,
    ),
    "kernels": Kind(
        shows="Time and extra memory of kernels from bench records, with quantiles.",
        needs="records of `ligerprof bench`, timed forward and backward in one (--pass full)",
        draw=_kernels,
    ),
    OF_A_RECIPE: Kind(
        shows="Checkpoints against the loss's planes, in closed form; from a recipe, no run.",
        needs="a recipe with checkpointing",
        draw=_planes,
    ),
}
