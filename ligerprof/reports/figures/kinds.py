"""The kinds of figures: the data that each needs, and how it is drawn from them."""

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
from ligerprof.reports.figures.logits import draw_logits
from ligerprof.reports.figures.memory import Recorded, draw_memory
from ligerprof.reports.figures.names import OF_A_RECIPE
from ligerprof.reports.figures.roles import draw_roles, find_bars
from ligerprof.reports.figures.series import describe_origin, describe_setting, name_settings, split_settings
from ligerprof.reports.figures.sources import Sources

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ligerprof.analyzers.explain.analysis import SnapshotAnalysis

# doublings are evenly spaced on a logarithmic axis
_BATCHES = tuple(2**power for power in range(8))
_SEQUENCES = tuple(2**power for power in range(9, 16))


@dataclass(frozen=True, kw_only=True, slots=True)
class PlotInput:
    """The data to draw.

    Attributes:
        recipe: for the kind that needs no sources.
        sizes: batches and sequences at which that recipe is estimated.
    """

    sources: Sources = field(default_factory=Sources)
    recipe: TrainingRecipe | None = None
    sizes: Mapping[Axis, Sequence[int]] = field(default_factory=lambda: {Axis.BATCH: _BATCHES, Axis.SEQ: _SEQUENCES})


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """A figure and the name of its file, without a suffix."""

    name: str
    figure: "Figure"


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of figure.

    Attributes:
        needs: the data it is drawn from, for errors.
        draw: yields nothing if these data are missing.
    """

    needs: str
    draw: Callable[[PlotInput], Iterator[Drawn]]


class NothingToDrawError(LigerprofError):
    """The given data do not allow a kind of figure."""


def draw(name: str, given: PlotInput) -> tuple[Drawn, ...]:
    """All figures of a kind; raises NothingToDrawError, with the data that are missing, if there are none."""
    kind = KINDS[name]
    drawn = tuple(kind.draw(given))
    if not drawn:
        raise NothingToDrawError(f"{name}: nothing to draw. It needs {kind.needs}.")
    return drawn


def _curves(name: str, axis: Axis, *quantities: Quantity) -> Kind:
    def drawn(given: PlotInput) -> Iterator[Drawn]:
        settings = [
            setting
            for setting in split_settings(given.sources.cells, along=(axis,))
            if all(curve_sizes(setting, axis, quantity) for quantity in quantities)
        ]
        for setting, words in zip(settings, name_settings(settings, along=(axis,)), strict=True):
            yield Drawn(name=_file_name(name, words), figure=draw_curves(setting, axis, *quantities))

    sizes = "batches" if axis is Axis.BATCH else "sequences"
    timed = ", with times: simulated steps have none" if "throughput" in quantities else ""
    return Kind(f"cells that ran at two {sizes} or more, all else but the kernels equal{timed}", drawn)


def _file_name(*parts: str) -> str:
    return "-".join(filter(None, parts))


def _ablation(given: PlotInput) -> Iterator[Drawn]:
    setting = find_ablation(split_settings(given.sources.cells, along=()))
    if setting is not None:
        yield Drawn(name="ablation", figure=draw_ablation(setting))


def _roles(given: PlotInput) -> Iterator[Drawn]:
    """Bars along batch and along sequence; if neither varies, one bar per kernel set."""
    drawn = [one for axis in Axis for one in _bars_along(given, axis)]
    yield from drawn or _bars_along(given, None)


def _bars_along(given: PlotInput, axis: Axis | None) -> Iterator[Drawn]:
    along = (axis,) if axis is not None else ()
    settings = split_settings(given.sources.cells, along=along)
    found = [(setting, find_bars(setting, axis or Axis.BATCH)) for setting in settings]
    chosen = [(setting, bars) for setting, bars in found if len({bar.group for bar in bars}) > (axis is not None)]
    names = name_settings([setting for setting, _ in chosen], along=along)
    for (setting, bars), words in zip(chosen, names, strict=True):
        sentences = f"Peak memory by role, {describe_origin(setting)}", describe_setting(setting, along=along)
        yield Drawn(name=_file_name("roles", axis or "", words), figure=draw_roles(bars, *sentences))


def _accuracy(given: PlotInput) -> Iterator[Drawn]:
    predictions = find_predictions(given.sources.cells)
    gpus = dict.fromkeys(cell.gpu for cell in given.sources.cells if cell.gpu)
    if predictions:
        sentence = f"Predicted peaks against those measured on {', '.join(gpus)}"
        yield Drawn(name="accuracy", figure=draw_accuracy(predictions, sentence))


def _memory(given: PlotInput) -> Iterator[Drawn]:
    sources = given.sources
    analyses = [source.analysis for source in sources.snapshots]
    every = [_recorded(title, analysis) for title, analysis in zip(sources.titles, analyses, strict=True)]
    if recordings := [recorded for recorded in every if recorded.span is not None]:
        origins = " and ".join(dict.fromkeys(source.origin for source in sources.snapshots if source.origin))
        sentence = ", ".join(filter(None, (_memory_title(recordings), origins)))
        yield Drawn(name="memory", figure=draw_memory(recordings, sentence))


def _recorded(title: str, analysis: "SnapshotAnalysis") -> Recorded:
    oom = analysis.out_of_memory
    if oom is None:
        return Recorded(title, analysis.timeline)
    return Recorded(title, analysis.timeline, analysis.replayed.failures[-1], oom.requested_bytes)


def _memory_title(recordings: Sequence[Recorded]) -> str:
    failed = sum(recorded.failed is not None for recorded in recordings)
    return (
        "Memory over one step"
        if not failed
        else "Memory until it ran out" + " or over one step" * (failed < len(recordings))
    )


def _layers(given: PlotInput) -> Iterator[Drawn]:
    sources = given.sources
    explained = [(title, one, one.analysis.peak) for title, one in zip(sources.titles, sources.snapshots, strict=True)]
    found = [(title, one, report) for title, one, report in explained if layer_breakdowns(report)]
    for number, (title, one, report) in enumerate(found, start=1):
        sentence = ", ".join(filter(None, (f"The peak layer by layer: {title}", one.origin)))
        name = _file_name("layers", str(number) if len(found) > 1 else "")
        yield Drawn(name=name, figure=draw_layers(report, sentence))


def _kernels(given: PlotInput) -> Iterator[Drawn]:
    machines = describe_machines(given.sources.findings)
    for one in find_kernel_figures(given.sources.findings):
        yield Drawn(name=_file_name("kernels", one.name), figure=draw_kernels(one, machines))


def _logits(given: PlotInput) -> Iterator[Drawn]:
    if given.recipe is not None:
        yield Drawn(name=OF_A_RECIPE, figure=draw_logits(given.recipe, given.sizes))


KINDS: Mapping[str, Kind] = {
    "batch": _curves("batch", Axis.BATCH, "peak", "throughput"),
    "seq": _curves("seq", Axis.SEQ, "peak", "throughput"),
    "peak-batch": _curves("peak-batch", Axis.BATCH, "peak"),
    "peak-seq": _curves("peak-seq", Axis.SEQ, "peak"),
    "throughput-batch": _curves("throughput-batch", Axis.BATCH, "throughput"),
    "throughput-seq": _curves("throughput-seq", Axis.SEQ, "throughput"),
    "ablation": Kind("cells of two kernel sets or more, none among them, all else equal", _ablation),
    "roles": Kind("cells that are done", _roles),
    "accuracy": Kind("measured cells that are done", _accuracy),
    "memory": Kind("a memory snapshot or a run directory with a whole step or a failed allocation in it", _memory),
    "layers": Kind("a memory snapshot or a run directory in which layers are recognized", _layers),
    "kernels": Kind("records of `ligerprof bench`, timed forward and backward in one (--pass full)", _kernels),
    OF_A_RECIPE: Kind("a recipe with checkpointing", _logits),
}
