"""Print a sweep: the planned cells, the progress, and the table of results."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ligerprof.analyzers.estimate import estimated_peak_bytes
from ligerprof.recipe.categories import Axis
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.reports.terminal import NO_FIGURE, listing_table, stacked
from ligerprof.roles import Backend
from ligerprof.runs.sweep.cells import Cell, CellStatus, cell_key, describe, distinguishing_options
from ligerprof.runs.sweep.runner import Border, SweepPlan, SweepResult, Watcher
from ligerprof.serialization import document, select
from ligerprof.units import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress
    from rich.table import Table

_STATUS_WORDS = {CellStatus.DONE: "done", CellStatus.OOM: "OUT OF MEMORY", CellStatus.FAILED: "FAILED"}


def origin_words(backend: Backend, gpu: str) -> str:
    """How figures were obtained, and on which GPU."""
    if backend is Backend.SIMULATED:
        return f"simulated for an {gpu} (no GPU was used)"
    return f"{backend.value} on {gpu}"


def plan_table(plan: SweepPlan, cells: Mapping[str, Cell]) -> "Table":
    """The cells in order, their estimated peaks, and their status so far."""
    distinguishing = distinguishing_options(plan.recipes)
    rows = []
    for recipe in plan.recipes:
        peak_bytes = estimated_peak_bytes(recipe)
        peak = NO_FIGURE if peak_bytes is None else format_bytes(peak_bytes)
        rows.append((describe(recipe, distinguishing), peak, _so_far(recipe, cells)))
    return listing_table("cell", "estimated peak", "so far", right=("estimated peak",), folded=("cell",), rows=rows)


def plan_json(plan: SweepPlan, cells: Mapping[str, Cell]) -> dict[str, Any]:
    """The object of `ligerprof sweep --dry-run --json`."""
    planned = [
        {
            "key": cell_key(recipe),
            "status": _so_far(recipe, cells),
            "estimated_peak_bytes": estimated_peak_bytes(recipe),
            "recipe": recipe.to_json(),
        }
        for recipe in plan.recipes
    ]
    return document("sweep-plan", select(plan, "grids"), {"cells": planned}, select(plan, "refused=refusals"))


def render_sweep(result: SweepResult) -> "RenderableType":
    """The cells, the skipped ones, and the borders."""
    from rich.text import Text

    parts: list[RenderableType] = []
    for backend, gpu in sorted({(cell.figures.backend, cell.gpu) for cell in result.cells if cell.figures is not None}):
        colour = "yellow" if backend is Backend.SIMULATED else "green"
        parts.append(Text(origin_words(backend, gpu), style=f"bold {colour}"))
    parts.append(_cells_table(result.cells))
    if result.borders:
        parts.append(_borders_table(result.borders))
    if result.left_out:
        parts.append(f"skipped above one out of memory: {len(result.left_out)}")
    parts += [f"left out: {refusal.reason}" for refusal in result.plan.refusals]
    return stacked(*parts, f"rows: {result.folder.results}")


def _cells_table(cells: Sequence[Cell]) -> "Table":
    """One row per cell: peak, reserved bytes, speed, and how it ended."""
    distinguishing = distinguishing_options(cell.recipe for cell in cells)
    figures = ("peak", "reserved", "step", "tokens/s")
    rows = [(describe(cell.recipe, distinguishing), *_figures(cell), _end_words(cell)) for cell in cells]
    return listing_table("cell", *figures, "end", right=figures, folded=("cell", "end"), rows=rows)


def _borders_table(borders: Sequence[Border]) -> "Table":
    """One row per line: the largest size that ran, and the smallest that was out of memory."""
    distinguishing = distinguishing_options(border.recipe for border in borders)
    sizes = ("largest that runs", "smallest out of memory")
    rows = []
    for border in borders:
        found = (str(value or "none") for value in (border.largest, border.smallest_oom))
        rows.append((_border_words(border, distinguishing), *found, border.reason or ""))
    return listing_table("border of", *sizes, "note", right=sizes, folded=("border of", "note"), rows=rows)


def _border_words(border: Border, distinguishing: Iterable[str]) -> str:
    """Such as `batch at 1024 tokens, all (ligerprof)`."""
    size, _, rest = describe(border.recipe, distinguishing).partition(", ")
    batch, _, seq = size.partition(" x ")
    return f"batch at {seq} tokens, {rest}" if border.axis is Axis.BATCH else f"sequence at batch {batch}, {rest}"


def _end_words(cell: Cell) -> str:
    """How a cell ended, and the reason if it failed."""
    words = _STATUS_WORDS[cell.status]
    return f"{words}: {cell.error}" if cell.status is CellStatus.FAILED else words


def _figures(cell: Cell) -> tuple[str, str, str, str]:
    if cell.status is not CellStatus.DONE or cell.figures is None:
        return "", "", "", ""
    return (
        format_bytes(cell.figures.peak_bytes),
        format_bytes(cell.reserved_bytes) if cell.reserved_bytes is not None else NO_FIGURE,
        f"{1000 * cell.step_seconds:.1f} ms" if cell.step_seconds is not None else NO_FIGURE,
        f"{cell.tokens_per_second:,.0f}" if cell.tokens_per_second is not None else NO_FIGURE,
    )


def _so_far(recipe: TrainingRecipe, cells: Mapping[str, Cell]) -> str:
    cell = cells.get(cell_key(recipe))
    return "to run" if cell is None else cell.status.value


class PlainWatcher(Watcher):
    """Prints one line per cell, for a stderr that is not a terminal."""

    def __init__(self, say: Callable[[str], None], distinguishing: Iterable[str]) -> None:
        super().__init__()
        self._say, self._distinguishing = say, tuple(distinguishing)

    def ended(self, cell: Cell) -> None:
        super().ended(cell)
        peak = f", peak {_figures(cell)[0]}" if cell.status is CellStatus.DONE else ""
        name = describe(cell.recipe, self._distinguishing)
        self._say(f"{self.ended_count}/{self.expected_count} {name}: {_end_words(cell)}{peak}; {self.left}")


class BarWatcher(Watcher):
    """A progress bar with the running cell and the time left."""

    def __init__(self, bar: "Progress", distinguishing: Iterable[str]) -> None:
        super().__init__()
        self._bar, self._distinguishing = bar, tuple(distinguishing)
        self._task = bar.add_task("starting", total=0, left="")

    def working(self, recipe: TrainingRecipe, words: str) -> None:
        from rich.markup import escape

        text = escape(f"{describe(recipe, self._distinguishing)}: {words}")
        self._bar.update(self._task, total=self.expected_count, description=text, left=self.left)

    def ended(self, cell: Cell) -> None:
        from rich.markup import escape

        super().ended(cell)
        self._bar.update(self._task, total=self.expected_count, completed=self.ended_count)
        if cell.status is CellStatus.FAILED:
            self._bar.console.print(escape(f"{describe(cell.recipe, self._distinguishing)}: {_end_words(cell)}"))


def progress_bar() -> "Progress":
    """The bar of a sweep, on stderr; the description is cut to the remaining width."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    return Progress(
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
        console=Console(stderr=True),
        expand=True,
        transient=True,
    )
