"""The kinds of figures: the sources that each needs, and how it is drawn from them."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ligerprof.analyzers.estimate import estimated_peak_bytes
from ligerprof.errors import LigerprofError, ResultFormatError
from ligerprof.files import FileKind, starts_as_json
from ligerprof.recipe.categories import Axis
from ligerprof.reports.figures.curves import (
    Quantity,
    curve_sizes,
    describe_origin,
    describe_setting,
    draw_ablation,
    draw_curves,
    find_ablation,
    kernel_set,
    name_settings,
    split_settings,
)
from ligerprof.reports.figures.memory import Recorded, draw_layers, draw_memory, draw_roles, find_bars, layer_breakdowns
from ligerprof.reports.figures.style import RULE, LineLook, drawing
from ligerprof.roles import Backend
from ligerprof.runs.directory import RESULT, read_result
from ligerprof.runs.sweep.cells import RESULTS_NAME, Cell, CellStatus, cell_from_json, read_cells
from ligerprof.snapshots import SNAPSHOT_NAME
from ligerprof.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ligerprof.analyzers.explain.analysis import SnapshotAnalysis


_AXES_INCHES = 1.9
_LOOKS = {
    "estimated": LineLook("#0072b2", "o", "", hollow=True, points=5.5),
    "simulated": LineLook("#d55e00", "x", "", points=4),
}
# least extent of the axis to either side, so that a thousandth of a percent does not look like an error
_LEAST_PERCENT = 0.1
# ratio of the largest to the smallest peak from which the axis is logarithmic
_WIDE = 5


class Prediction(NamedTuple):
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


_RESULTS = FileKind(error=ResultFormatError, hint="Give a file of sweep or step.")


@dataclass(frozen=True, kw_only=True)
class SnapshotSource:
    """A recording, which is read when a figure needs it.

    Attributes:
        titles: names to choose from, shorter ones first.
        origin: `measured` or `simulated`, empty if unknown.
    """

    path: Path
    titles: tuple[str, ...]
    origin: str = ""

    @cached_property
    def analysis(self) -> "SnapshotAnalysis":
        """The recording, analyzed once for all figures; raises SnapshotFormatError if it is not a snapshot."""
        from ligerprof.analyzers.explain.analysis import analyze

        return analyze(self.path)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """The contents of all sources."""

    cells: tuple[Cell, ...] = ()
    snapshots: tuple[SnapshotSource, ...] = ()

    @property
    def titles(self) -> tuple[str, ...]:
        """The shortest distinct names of the recordings; the longest ones if those are not distinct either."""
        longest = max((len(source.titles) for source in self.snapshots), default=0)
        names: tuple[str, ...] = ()
        for level in range(longest):
            names = tuple(source.titles[min(level, len(source.titles) - 1)] for source in self.snapshots)
            if len(set(names)) == len(names):
                break
        return names


def read_sources(paths: Iterable[Path]) -> Sources:
    """Sort files and folders by their contents, and read all but the recordings.

    A folder belongs to a sweep (results.jsonl) or to a run (result.json, snapshot.pickle), or contains only a
    recording. A file contains the rows of a sweep, one result, or a memory snapshot.

    Raises:
        ResultFormatError, RunDirectoryError: a path is none of these.
    """
    cell_files: list[Path] = []
    snapshots: list[SnapshotSource] = []
    runs: list[Cell] = []
    for path in paths:
        if path.is_dir() and not (path / RESULTS_NAME).exists():
            run, recording = _read_run(path)
            runs += run
            snapshots += recording
        elif path.is_dir() or starts_as_json(path, _RESULTS):
            cell_files.append(path)
        else:
            snapshots.append(SnapshotSource(path=path, titles=(path.name.partition(".")[0],)))
    cells = (*read_cells(cell_files), *runs)
    return Sources(cells=cells, snapshots=tuple(snapshots))


def _read_run(path: Path) -> tuple[list[Cell], list[SnapshotSource]]:
    """The result and the recording of a run directory, if it contains them."""
    snapshot = path / SNAPSHOT_NAME
    if not (path / RESULT).exists():
        if not snapshot.exists():
            raise ResultFormatError(
                f"{path}: neither {RESULTS_NAME} nor {RESULT} nor {SNAPSHOT_NAME} in it. Give a sweep or a run."
            )
        return [], [SnapshotSource(path=snapshot, titles=(path.name,))]
    cell = cell_from_json(read_result(path), str(path / RESULT))
    recipe = cell.recipe
    kernels = kernel_set(recipe)
    provided = f"{kernels}, {recipe.provider_names}" if recipe.kernels else kernels
    titles = (kernels, provided, f"{kernels}, {recipe.batch} x {recipe.seq}", path.name)
    origin = cell.figures.backend if cell.figures is not None else ""
    recording = [SnapshotSource(path=snapshot, titles=titles, origin=origin)] if snapshot.exists() else []
    return [cell], recording


class Drawn(NamedTuple):
    """A figure and the name of its file, without a suffix."""

    name: str
    figure: "Figure"


class PlotKind(NamedTuple):
    """One kind of figure.

    Attributes:
        needs: the data it is drawn from, for errors.
        draw: yields nothing if these data are missing.
    """

    needs: str
    draw: Callable[[Sources], Iterator[Drawn]]


class NothingToDrawError(LigerprofError):
    """The given data do not allow a kind of figure."""


def draw(name: str, sources: Sources) -> tuple[Drawn, ...]:
    """All figures of a kind; raises NothingToDrawError, with the data that are missing, if there are none."""
    kind = KINDS[name]
    drawn = tuple(kind.draw(sources))
    if not drawn:
        raise NothingToDrawError(f"{name}: nothing to draw. It needs {kind.needs}.")
    return drawn


def _curves(name: str, axis: Axis, *quantities: Quantity) -> PlotKind:
    def drawn(sources: Sources) -> Iterator[Drawn]:
        settings = [
            setting
            for setting in split_settings(sources.cells, along=(axis,))
            if all(curve_sizes(setting, axis, quantity) for quantity in quantities)
        ]
        for setting, words in zip(settings, name_settings(settings, along=(axis,)), strict=True):
            yield Drawn(name=_file_name(name, words), figure=draw_curves(setting, axis, *quantities))

    sizes = "batches" if axis is Axis.BATCH else "sequences"
    timed = ", with times: simulated steps have none" if "throughput" in quantities else ""
    return PlotKind(f"cells that ran at two {sizes} or more, all else but the kernels equal{timed}", drawn)


def _file_name(*parts: str) -> str:
    return "-".join(filter(None, parts))


def _ablation(sources: Sources) -> Iterator[Drawn]:
    setting = find_ablation(split_settings(sources.cells, along=()))
    if setting is not None:
        yield Drawn(name="ablation", figure=draw_ablation(setting))


def _roles(sources: Sources) -> Iterator[Drawn]:
    """Bars along batch and along sequence; if neither varies, one bar per kernel set."""
    drawn = [one for axis in Axis for one in _bars_along(sources, axis)]
    yield from drawn or _bars_along(sources, None)


def _bars_along(sources: Sources, axis: Axis | None) -> Iterator[Drawn]:
    along = (axis,) if axis is not None else ()
    settings = split_settings(sources.cells, along=along)
    found = [(setting, find_bars(setting, axis or Axis.BATCH)) for setting in settings]
    chosen = [(setting, bars) for setting, bars in found if len({bar.group for bar in bars}) > (axis is not None)]
    names = name_settings([setting for setting, _ in chosen], along=along)
    for (setting, bars), words in zip(chosen, names, strict=True):
        sentences = f"Peak memory by role, {describe_origin(setting)}", describe_setting(setting, along=along)
        yield Drawn(name=_file_name("roles", axis or "", words), figure=draw_roles(bars, *sentences))


def _accuracy(sources: Sources) -> Iterator[Drawn]:
    predictions = find_predictions(sources.cells)
    gpus = dict.fromkeys(cell.gpu for cell in sources.cells if cell.gpu)
    if predictions:
        sentence = f"Predicted peaks against those measured on {', '.join(gpus)}"
        yield Drawn(name="accuracy", figure=draw_accuracy(predictions, sentence))


def _memory(sources: Sources) -> Iterator[Drawn]:
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
    until = "Memory until it ran out" + " or over one step" * (failed < len(recordings))
    return until if failed else "Memory over one step"


def _layers(sources: Sources) -> Iterator[Drawn]:
    explained = [(title, one, one.analysis.peak) for title, one in zip(sources.titles, sources.snapshots, strict=True)]
    found = [(title, one, report) for title, one, report in explained if layer_breakdowns(report)]
    for number, (title, one, report) in enumerate(found, start=1):
        sentence = ", ".join(filter(None, (f"The peak layer by layer: {title}", one.origin)))
        name = _file_name("layers", str(number) if len(found) > 1 else "")
        yield Drawn(name=name, figure=draw_layers(report, sentence))


KINDS: Mapping[str, PlotKind] = {
    "batch": _curves("batch", Axis.BATCH, "peak", "throughput"),
    "seq": _curves("seq", Axis.SEQ, "peak", "throughput"),
    "peak-batch": _curves("peak-batch", Axis.BATCH, "peak"),
    "peak-seq": _curves("peak-seq", Axis.SEQ, "peak"),
    "ablation": PlotKind("cells of two kernel sets or more, none among them, all else equal", _ablation),
    "roles": PlotKind("cells that are done", _roles),
    "accuracy": PlotKind("measured cells that are done", _accuracy),
    "memory": PlotKind("a memory snapshot or a run directory with a whole step or a failed allocation in it", _memory),
    "layers": PlotKind("a memory snapshot or a run directory in which layers are recognized", _layers),
}
