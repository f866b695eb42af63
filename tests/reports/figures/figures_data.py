"""Sweeps made from the closed form, for tests of figures, and what a drawn figure says and where its words stand."""

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator
from matplotlib.transforms import Bbox

from ligerprof.recipe.training import TrainingRecipe
from ligerprof.reports.figures.style import styled
from ligerprof.roles import Role
from ligerprof.runs.sweep.cells import Cell, cell_from_json
from ligerprof.units import GIB
from tests.paths import REPOSITORY

SNAPSHOTS = REPOSITORY / "tests" / "data" / "snapshots"
STEPS = REPOSITORY / "benchmarks" / "results" / "steps-h200.jsonl"
KERNELS = REPOSITORY / "benchmarks" / "results" / "kernels-h200.jsonl"
LIMIT = 47 * GIB // 2
STUDY: dict[str, Any] = {
    "precision": "mixed-fp16",
    "engine": "deepspeed",
    "zero": 3,
    "offload": "all",
    "memory_limit_bytes": LIMIT,
}
BATCHES = (1, 4, 8, 16, 32, 64, 96, 112)
SEQUENCES = (512, 1024, 2048, 4096, 8192, 12288, 16384, 24576)
SETS = (("none", "ligerprof"), ("no-flce", "ligerprof"), ("all", "ligerprof"), ("all", "liger"))


def roles_of(recipe: TrainingRecipe) -> dict[Role, int]:
    """Made-up bytes that grow as real ones do; figures must not change with the closed form."""
    tokens = recipe.tokens
    fused = {"ce": 1, "flce": 0}.get(next(iter({"ce", "flce"} & set(recipe.kernels)), ""), 3)
    layers = 120_000 if {"swiglu", "rms"} & set(recipe.kernels) else 130_000
    return {
        Role.PARAMETERS: GIB,
        Role.GRADIENTS: GIB // 2,
        Role.OPTIMIZER_STATES: 2 * GIB,
        Role.CHECKPOINTS: 65_536 * tokens,
        Role.ACTIVATIONS: layers * tokens,
        Role.CE_TEMPORARIES: fused * 513_024 * tokens,
        Role.KERNEL_WORKSPACE: 0 if fused else (2 + (recipe.provider == "liger")) * GIB // 4,
        Role.INPUTS: 16 * tokens,
        Role.ALLOCATOR_ROUNDING: 4096,
    }


def row(recipe: TrainingRecipe, *, backend: str = "measured", **changes: Any) -> dict[str, Any]:
    """A sweep's row, out of memory where a tenth more than its peak is over the limit."""
    roles = roles_of(recipe)
    peak = sum(roles.values())
    limit = recipe.memory_limit_bytes
    lost = limit is not None and 1.1 * peak > limit
    timed = backend == "measured" and not lost
    figures = {
        "schema": 1,
        "peak_bytes": peak,
        "phases": {"forward": peak // 2, "backward": peak, "optimizer": GIB},
        "roles": {role.value: size for role, size in roles.items()},
    }
    values = {
        **figures,
        "kind": "cell",
        "key": json.dumps([backend, recipe.to_json()]),
        "status": "oom" if lost else "done",
        "backend": backend,
        "gpu": "NVIDIA H200",
        "reserved_bytes": peak,
        "step_seconds": 1.0 if timed else None,
        "tokens_per_second": tokens_per_second(recipe) if timed else None,
        "oom": {"limit_bytes": limit} if lost else None,
        "recipe": recipe.to_json(),
    }
    return {**values, **changes}


def tokens_per_second(recipe: TrainingRecipe) -> float:
    """Made-up speed that levels off, as a real one does."""
    return 40_000 * recipe.tokens / (20_000 + recipe.tokens) * (1 + 0.05 * len(recipe.kernels))


def cells_of(rows: Iterable[dict[str, Any]]) -> tuple[Cell, ...]:
    return tuple(cell_from_json(values, "test") for values in rows)


@cache
def study_rows() -> tuple[dict[str, Any], ...]:
    """The shape of the study: batch and sequence against four kernel sets, and each kernel alone."""
    places = [*((batch, 1024) for batch in BATCHES), *((4, seq) for seq in SEQUENCES if seq != 1024)]
    grid = [(batch, seq, *one) for batch, seq in places for one in SETS]
    grid += [(8, 1024, name, "ligerprof") for name in ("rope", "rms", "swiglu", "ce", "flce")]
    return tuple(
        row(TrainingRecipe(batch=batch, seq=seq, liger=liger, provider=provider, device="cuda", **STUDY))
        for batch, seq, liger, provider in grid
    )


def study_cells() -> tuple[Cell, ...]:
    return cells_of(study_rows())


def laid_out(figure: Figure) -> Figure:
    """The figure with everything where it is when it is written."""
    with styled():
        FigureCanvasAgg(figure).draw()
    return figure


def words(figure: Figure) -> list[Text]:
    """Every text that can be seen."""
    found = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    hidden = {id(label) for axes in figure.axes for label in _hidden_ticks(axes)}
    return [text for text in found if id(text) not in hidden]


def _hidden_ticks(axes: Axes) -> Iterator[Text]:
    """Labels of ticks beyond the ends of an axis, and of axes that are switched off; matplotlib does not draw them."""
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        slack = 1e-6 * (high - low)
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            if not axes.axison or not low - slack <= tick.get_loc() <= high + slack:
                yield from (tick.label1, tick.label2)
        if not axes.axison:
            yield axis.label


def overlaps(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of texts whose boxes share more than half a point."""
    boxes = _boxes(figure)
    return [(a, b) for (a, first), (b, second) in itertools.combinations(boxes, 2) if first.overlaps(second)]


def outside(figure: Figure) -> list[str]:
    """Texts that the edge of the figure cuts."""
    edge = figure.bbox
    return [
        text
        for text, box in _boxes(figure)
        if box.x0 < edge.x0 or box.y0 < edge.y0 or box.x1 > edge.x1 or box.y1 > edge.y1
    ]


def legends_over_data(figure: Figure) -> list[str]:
    """Legends that reach into axes."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    return [
        str(legend)
        for legend in (*figure.legends, *(axes.get_legend() for axes in figure.axes))
        if legend is not None
        if any(legend.get_window_extent(renderer).overlaps(axes.get_window_extent(renderer)) for axes in figure.axes)
    ]


def _boxes(figure: Figure) -> list[tuple[str, Bbox]]:
    """What each text covers, less half a point on each side; empty first lines cover nothing."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    slack = 0.5 * figure.dpi / 72
    boxes = []
    for text in words(figure):
        shown, box = text.get_text(), text.get_window_extent(renderer)
        empty = (len(shown) - len(shown.lstrip("\n"))) / (shown.count("\n") + 1)
        top = box.y1 - empty * box.height - slack
        boxes.append((shown.strip(), Bbox.from_extents(box.x0 + slack, box.y0 + slack, box.x1 - slack, top)))
    return boxes


def description(figure: Figure, *, data: bool) -> str:
    """Everything a figure says: its words and, where asked for, its data to four digits."""
    lines = [f"{figure.get_figwidth():.1f} inches wide", *(figure.get_suptitle()).splitlines()]
    for number, axes in enumerate(figure.axes, start=1):
        if axes.axison:
            lines += [
                f"panel {number}: {axes.get_title(loc='left')}".rstrip(": "),
                *_words_of_panel(axes),
                *(_data_of_panel(axes) if data else []),
            ]
    for legend in figure.legends:
        lines.append("legend: " + "; ".join(text.get_text() for text in legend.get_texts()))
    return "\n".join(lines)


def _words_of_panel(axes: Axes) -> Iterator[str]:
    for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        # which round numbers an axis shows is matplotlib's choice, and not the same in all its versions
        chosen = axis.get_ticklabels() if isinstance(axis.get_major_locator(), FixedLocator) else []
        ticks = " ".join(tick.get_text().replace("\n", "_").replace(" ", "-") for tick in chosen)
        yield f"  {name}: {axis.get_label_text()} [{ticks}]"
    for text in axes.texts:
        yield f"  text {text.get_text()}"


def _data_of_panel(axes: Axes) -> Iterator[str]:
    for line in axes.get_lines():
        xs, ys = line.get_data()
        if len(xs):
            yield f"  line {line.get_label()}: {_digits(xs)} -> {_digits(ys)}"
    for bars in axes.containers:
        if isinstance(bars, BarContainer):
            sizes = [patch.get_width() if bars.orientation == "horizontal" else patch.get_height() for patch in bars]
            yield f"  bars {bars.get_label()}: {_digits(sizes)}"


def _digits(values: Sequence[float] | np.ndarray) -> str:
    return " ".join(f"{float(value):.4g}" for value in np.ravel(values))
