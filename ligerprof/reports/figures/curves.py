"""Figures of sweeps and searches: cells as lines, peak and throughput, ablations, frontiers, growth of logits."""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ligerprof.analyzers.search.fit import Fit
from ligerprof.kernels.selection import KERNEL_NAMES, select_kernels
from ligerprof.recipe.categories import Axis, Device, Offload, Optimizer
from ligerprof.recipe.training import RECIPE_OPTIONS, TrainingRecipe
from ligerprof.reports.figures.style import HALF_PAGE_INCHES, INK, RULE, LineLook, drawing, mark_limit, mark_sizes
from ligerprof.reports.sweep import origin_words
from ligerprof.roles import Backend
from ligerprof.runs.sweep.cells import Cell, CellStatus
from ligerprof.units import GIB, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


AXIS_TITLES: Mapping[Axis, str] = {Axis.BATCH: "batch, sequences", Axis.SEQ: "sequence, tokens"}
_CURRENT_LOSS = "hf"
# the fields that distinguish the lines of one figure
_OF_A_SERIES = ("liger", "provider", "flce_budget", "loss")
# the fields that distinguish figures, in the order of their titles, with their words in a title; empty: not in titles
_OF_A_SETTING: Mapping[str, str] = {
    "batch": "batch {}",
    "seq": "sequence {}",
    "precision": "{}",
    "checkpointing": "checkpointed",
    "checkpoint_every": "one of {} layers checkpointed",
    "selective": "{} kept",
    "activation_offload": "activations offloaded",
    "compile": "compiled",
    "reentrant": "reentrant",
    "optimizer": "{}",
    "attention": "{} attention",
    "grad_accum": "{} micro-batches",
    "padding": "{:.0%} padding",
    "lora": "LoRA of rank {}",
    "qlora": "QLoRA of rank {}",
    "quantization": "{} weights",
    "lora_targets": "adapters on {}",
    "lora_dropout": "adapter dropout {}",
    "dora": "DoRA",
    "modules_to_save": "{} trained in full",
    "engine": "",
    "zero": "ZeRO-{}",
    "offload": "offload {}",
    "gpus": "{} GPUs",
    "memory_limit_bytes": "",
    "alloc_conf": "{}",
}
# in every title, even with the default value
_ALWAYS = ("batch", "seq", "precision", "checkpointing")
_SET_LOOKS: Mapping[str, LineLook] = {
    "none": LineLook("#000000", "o", (0, (1, 1.2)), hollow=True, points=7.5),
    "no-flce": LineLook("#0072b2", "s", (0, (5, 1.5, 1, 1.5))),
    "flce": LineLook("#009e73", "^", (0, (3, 1)), points=5),
    "ce": LineLook("#cc79a7", "v", (0, (6, 2)), points=5),
    "all": LineLook("#d55e00", "D", points=4),
}
_OTHER_LOOKS = (
    LineLook("#7a5195", "P", (0, (4, 1, 1, 1, 1, 1)), points=5),
    LineLook("#8a6d00", "X", (0, (2, 2)), points=5),
    LineLook("#56b4e9", "<", (0, (7, 1)), points=5),
    LineLook("#737373", ">", (0, (1, 2.5)), points=5),
)
# other providers and the loss of 2024 take the set's color, with hollow markers and another line style
_OTHER_DASHES = ((0.0, (3.0, 1.6)), (0.0, (1.2, 1.6)), (0.0, (6.0, 1.2, 1.2, 1.2)))


class Series(NamedTuple):
    """Cells that make one line.

    Attributes:
        label: kernel set, and the other words that distinguish the line.
        cells: in order along the axis, without failed ones.
    """

    label: str
    kernels: str
    look: LineLook
    cells: tuple[Cell, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FigureSetting:
    """Cells of one figure; `recipe` is that of the first cell."""

    recipe: TrainingRecipe
    gpu: str
    cells: tuple[Cell, ...]

    @property
    def backends(self) -> tuple[Backend, ...]:
        """How the figures were obtained, without those of failed cells."""
        ran = [cell.figures for cell in self.cells if cell.status is not CellStatus.FAILED]
        return tuple(dict.fromkeys(figures.backend for figures in ran if figures is not None))


class _Key(NamedTuple):
    """The words that distinguish the lines of a figure."""

    kernels: str
    provider: str
    budget: str
    loss: str
    backend: str


def split_settings(cells: Iterable[Cell], *, along: Sequence[str]) -> tuple[FigureSetting, ...]:
    """Group cells that differ only in their kernels and in the fields `along`."""
    found = tuple(cells)
    free = {*along, *_OF_A_SERIES, "model", "device", "warmup", "repeats"}
    names = [name for name in RECIPE_OPTIONS if name not in free]
    gpus = tuple(dict.fromkeys(cell.gpu for cell in found if cell.gpu))
    groups: dict[tuple[str, ...], list[Cell]] = {}
    for cell in found:
        # cells that failed before they recorded the GPU ran on the only GPU of the others
        gpu = gpus[0] if len(gpus) == 1 else cell.gpu
        key = (gpu, cell.recipe.spec.name, *(repr(getattr(cell.recipe, name)) for name in names))
        groups.setdefault(key, []).append(cell)
    return tuple(
        FigureSetting(recipe=members[0].recipe, gpu=key[0], cells=tuple(members)) for key, members in groups.items()
    )


def name_settings(settings: Sequence[FigureSetting], *, along: Sequence[str]) -> tuple[str, ...]:
    """The fewest words that distinguish each setting, for the file's name; none for a single setting."""
    words_of = [list(_words_of(setting, along)) for setting in settings]
    names = [""] * len(settings)
    for place in range(len(_OF_A_SETTING) + 2):
        if len(set(names)) == len(names):
            break
        if len({words[place] for words in words_of}) > 1:
            names = ["-".join(filter(None, (name, words[place]))) for name, words in zip(names, words_of, strict=True)]
    return tuple(re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-") for name in names)


def _words_of(setting: FigureSetting, along: Sequence[str]) -> Iterator[str]:
    yield setting.recipe.spec.name
    yield setting.gpu
    for name in _OF_A_SETTING:
        value = getattr(setting.recipe, name)
        if name in along:
            yield ""
        elif name == "checkpointing":
            yield "checkpointed" if value else "not-checkpointed"
        else:
            yield value if isinstance(value, str) else f"{name}-{value}"


def split_series(setting: FigureSetting, axis: Axis) -> tuple[Series, ...]:
    """The lines of a figure, starting with no kernels; the last of several cells at one place counts."""
    groups: dict[_Key, dict[int, Cell]] = {}
    for cell in setting.cells:
        if cell.status is not CellStatus.FAILED:
            groups.setdefault(_series_key(cell, setting), {})[getattr(cell.recipe, axis)] = cell
    ordered = sorted(groups, key=_rank)
    return tuple(
        Series(
            label=_label(key, ordered),
            kernels=key.kernels,
            look=_look(key, ordered),
            cells=tuple(groups[key][place] for place in sorted(groups[key])),
        )
        for key in ordered
    )


def kernel_set(recipe: TrainingRecipe) -> str:
    """The shortest word for a recipe's kernels: none, no-flce, all, or their names."""
    for word in ("none", "all", "no-flce"):
        if recipe.kernels == select_kernels(word, recipe.spec):
            return word
    return "+".join(recipe.kernels)


def describe_setting(setting: FigureSetting, *, along: Sequence[str]) -> str:
    """The constants of a figure: the model, the important fields, and those that differ from their default."""
    recipe = setting.recipe
    usual = TrainingRecipe(model=recipe.spec)
    found = [recipe.spec.name]
    for name, words in _OF_A_SETTING.items():
        value = getattr(recipe, name)
        # offloading implies the CPU optimizer
        implied = name == "optimizer" and recipe.offload is not Offload.NONE and value is Optimizer.DEEPSPEED_CPU_ADAM
        if not words or name in along or implied or (name not in _ALWAYS and value == getattr(usual, name)):
            continue
        found.append(f"not {words}" if name == "checkpointing" and not value else words.format(value))
    return ", ".join(found)


def describe_origin(setting: FigureSetting) -> str:
    """How the figures were obtained, as the end of a sentence."""
    return "; ".join(origin_words(backend, setting.gpu or "an unknown GPU") for backend in setting.backends)


def _series_key(cell: Cell, setting: FigureSetting) -> _Key:
    recipe = cell.recipe
    backends = [cell.figures.backend] if cell.figures is not None else list(setting.backends)
    if len(backends) != 1:
        backends = [Backend.SIMULATED if recipe.device is Device.SIMULATED else Backend.MEASURED]
    return _Key(
        kernels=kernel_set(recipe),
        provider=recipe.provider_names if recipe.kernels else "",
        budget=str(recipe.flce_budget) if "flce" in recipe.kernels else "",
        loss=recipe.loss,
        backend=backends[0],
    )


def _rank(key: _Key) -> tuple[Any, ...]:
    words = ("none", "no-flce", "flce", "all")
    place = words.index(key.kernels) if key.kernels in words else len(words)
    # our own kernels and the current loss last: they are drawn on top, with the set's own look
    return place, key.kernels, key.provider == "ligerprof", key.loss == _CURRENT_LOSS, *key[1:]


def _label(key: _Key, keys: Sequence[_Key]) -> str:
    """The kernel set, and each further word in which lines of the figure differ."""
    parts = [key.kernels]
    for place in range(1, len(key)):
        values = {other[place] for other in keys if other[place]}
        if key[place] and len(values) > 1 and key[place] != _CURRENT_LOSS:
            parts.append(key[place])
    return ", ".join(parts)


def _look(key: _Key, keys: Sequence[_Key]) -> LineLook:
    """One color and marker per kernel set, the same in every figure; one line style per line."""
    unknown = sorted({other.kernels for other in keys} - set(_SET_LOOKS))
    look = _SET_LOOKS.get(key.kernels) or _OTHER_LOOKS[unknown.index(key.kernels) % len(_OTHER_LOOKS)]
    same = [other for other in keys if other.kernels == key.kernels]
    # the line with the set's own look is ranked last
    number = len(same) - 1 - same.index(key)
    if number == 0:
        return look
    dashes = _OTHER_DASHES[(number - 1) % len(_OTHER_DASHES)]
    return dataclasses.replace(look, dashes=dashes, hollow=True, points=look.points + 2.5)


Quantity = Literal["peak", "throughput"]
VALUE_TITLES: dict[Quantity, str] = {"peak": "peak allocated, GiB", "throughput": "tokens/s"}
_AXES_INCHES = 2.0
# width of the axis title, the tick labels and the figure's edge
_MARGIN_INCHES = 0.7
_CROSS_INCHES = 0.075
_CROSS: dict[str, Any] = {"marker": "x", "linestyle": "", "markersize": 5.5, "markeredgewidth": 1.6, "zorder": 5}


class _Line(NamedTuple):
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
        return self.places if self.ran_out is None else (*self.places, self.ran_out)


def value_of(cell: Cell, quantity: Quantity) -> float | None:
    """Peak in GiB or tokens per second; None if the cell has none."""
    if cell.status is not CellStatus.DONE:
        return None
    if quantity == "throughput":
        return cell.tokens_per_second
    return None if cell.figures is None else cell.figures.peak_bytes / GIB


def draw_curves(setting: FigureSetting, axis: Axis, *quantities: Quantity) -> "Figure":
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


def curve_sizes(setting: FigureSetting, axis: Axis, quantity: Quantity = "peak") -> dict[int, int]:
    """Sizes with a point or a cross, ascending, with the number of lines at each; empty without a line."""
    counts = Counter(size for line in _lines(setting, axis, quantity) for size in line.sizes)
    return dict(sorted(counts.items()))


def _lines(setting: FigureSetting, axis: Axis, quantity: Quantity) -> list[_Line]:
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


def _draw_panel(axes: "Axes", lines: Sequence[_Line], setting: FigureSetting, quantity: Quantity) -> None:
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


_BAR_INCHES = 0.19
_COLORS: dict[Quantity, str] = {"peak": "#56b4e9", "throughput": "#e69f00"}
_REFERENCE_COLOR = "#737373"
# space to the right of the longest bar, as a multiple of its length, for the change: the same inches in one panel as in
# each of two
_ROOM = {1: 1.25, 2: 1.7}
_SMALLEST_CHANGE = 0.005
# label and cell of one kernel set
_Bar = tuple[str, Cell]


def find_ablation(settings: Sequence[FigureSetting]) -> FigureSetting | None:
    """The setting with the most kernel sets, then the most tokens; each setting has one batch and one sequence."""
    able = [setting for setting in settings if len(bars := _bars(setting)) > 1 and any(map(_is_reference, bars))]
    return max(able, key=lambda setting: (len(_bars(setting)), setting.recipe.tokens), default=None)


def draw_ablation(setting: FigureSetting) -> "Figure":
    """One bar per kernel set, with its change from no kernels; throughput only if every set has one."""
    bars = _bars(setting)
    timed = all(value_of(cell, "throughput") is not None for _, cell in bars)
    quantities: list[Quantity] = ["peak", "throughput"] if timed else ["peak"]
    sentence = f"Kernels alone and together, {describe_origin(setting)}"
    with drawing(0.5 + _BAR_INCHES * len(bars), sentence, describe_setting(setting, along=())) as figure:
        panels = figure.subplots(1, len(quantities), squeeze=False, sharey=True)[0]
        for axes, quantity in zip(panels, quantities, strict=True):
            _draw_ablation_panel(axes, bars, quantity, _ROOM[len(quantities)])
        panels[0].set_yticks(range(len(bars)), [label for label, _ in bars])
        panels[0].invert_yaxis()
    return figure


def _bars(setting: FigureSetting) -> list[_Bar]:
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


def _draw_ablation_panel(axes: "Axes", bars: Sequence[_Bar], quantity: Quantity, room: float) -> None:
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


_FRONTIER_INCHES = 2.2
_TICKS_INCHES = 2.7
_FRONTIER = LineLook("#0072b2", "o")
_FITS, _LOST = LineLook("#009e73", "*", "", points=9), LineLook("#d55e00", "X", "", points=7)


def draw_frontier(fit: Fit) -> "Figure":
    """Largest batch over tokens per sequence, both on doubling axes, with the requested pair marked."""
    pair = f"{fit.recipe.batch} x {fit.recipe.seq}"
    with drawing(_FRONTIER_INCHES, "The largest batch at each sequence", fit.recipe.summary, columns=1) as figure:
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
