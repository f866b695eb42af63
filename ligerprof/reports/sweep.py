"""Print a sweep: the cells that are planned, the progress, and the table of results."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ligerprof.analyzers.estimate import estimated_peak_bytes
from ligerprof.recipe.categories import Axis
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.reports.listing import add_listing_row, listing_table
from ligerprof.roles import Backend
from ligerprof.runs.sweep.borders import Border
from ligerprof.runs.sweep.cells import Cell, CellStatus
from ligerprof.runs.sweep.grid import cell_key, describe, distinguishing_options
from ligerprof.runs.sweep.session import SweepPlan, SweepResult
from ligerprof.units import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress
    from rich.table import Table
    from rich.text import Text

_NO_FIGURE = "n/a"
_STATUS_WORDS = {CellStatus.DONE: "done", CellStatus.OOM: "OUT OF MEMORY", CellStatus.FAILED: "FAILED"}


def origin_words(backend: Backend, gpu: str) -> str:
    """How figures were obtained; simulated ones are never taken for measured ones."""
    if backend is Backend.SIMULATED:
        return f"simulated for an {gpu} (no GPU was used)"
    return f"{backend.value} on {gpu}"


def plan_table(plan: SweepPlan, cells: Mapping[str, Cell]) -> "Table":
    """The cells in order, their estimated peaks, and their status so far."""
    distinguishing = distinguishing_options(plan.recipes)
    table = listing_table("cell", "estimated peak", "so far", right=("estimated peak",), folded=("cell",))
    for recipe in plan.recipes:
        peak_bytes = estimated_peak_bytes(recipe)
        peak = _NO_FIGURE if peak_bytes is None else format_bytes(peak_bytes)
        add_listing_row(table, describe(recipe, distinguishing), peak, _so_far(recipe, cells))
    return table


def plan_json(plan: SweepPlan, cells: Mapping[str, Cell]) -> dict[str, Any]:
    """The object of `ligerprof sweep --dry-run --json`."""
    return {
        "schema": 1,
        "kind": "sweep-plan",
        "grids": [grid.to_json() for grid in plan.grids],
        "cells": [
            {
                "key": cell_key(recipe),
                "status": _so_far(recipe, cells),
                "estimated_peak_bytes": estimated_peak_bytes(recipe),
                "recipe": recipe.to_json(),
            }
            for recipe in plan.recipes
        ],
        "refused": [{"options": dict(refusal.values), "reason": refusal.reason} for refusal in plan.refusals],
    }


def render_sweep(result: SweepResult) -> "RenderableType":
    """The cells, the skipped ones, and the borders."""
    from rich.console import Group
    from rich.text import Text

    lines = [Text(f"skipped above one out of memory: {len(result.left_out)}")] if result.left_out else []
    borders = [borders_table(result.borders)] if result.borders else []
    refused = [Text(f"left out: {refusal.reason}") for refusal in result.plan.refusals]
    where = Text(f"rows: {result.folder.results}")
    return Group(*_backend_lines(result.cells), cells_table(result.cells), *borders, *lines, *refused, where)


def _backend_lines(cells: Sequence[Cell]) -> "Iterator[Text]":
    from rich.text import Text

    backends = {(cell.figures.backend, cell.gpu) for cell in cells if cell.figures is not None}
    for backend, gpu in sorted(backends):
        colour = "yellow" if backend is Backend.SIMULATED else "green"
        yield Text(origin_words(backend, gpu), style=f"bold {colour}")


def cells_table(cells: Sequence[Cell]) -> "Table":
    """One row per cell: peak, reserved bytes, speed, and how it ended."""
    distinguishing = distinguishing_options(cell.recipe for cell in cells)
    figures = ("peak", "reserved", "step", "tokens/s")
    table = listing_table("cell", *figures, "end", right=figures, folded=("cell", "end"))
    for cell in cells:
        add_listing_row(table, describe(cell.recipe, distinguishing), *_figures(cell), end_words(cell))
    return table


def borders_table(borders: Sequence[Border]) -> "Table":
    """One row per line: the largest size that ran, and the smallest that was out of memory."""
    distinguishing = distinguishing_options(border.recipe for border in borders)
    sizes = ("largest that runs", "smallest out of memory")
    table = listing_table("border of", *sizes, "note", right=sizes, folded=("border of", "note"))
    for border in borders:
        largest, smallest = (str(value or "none") for value in (border.largest, border.smallest_oom))
        add_listing_row(table, border_words(border, distinguishing), largest, smallest, border.reason or "")
    return table


def border_words(border: Border, distinguishing: Iterable[str]) -> str:
    """The border of a line in words, such as `batch at 1024 tokens, all (ligerprof)`."""
    size, _, rest = describe(border.recipe, distinguishing).partition(", ")
    batch, _, seq = size.partition(" x ")
    return f"batch at {seq} tokens, {rest}" if border.axis is Axis.BATCH else f"sequence at batch {batch}, {rest}"


def end_words(cell: Cell) -> str:
    """How a cell ended, and the reason if it failed."""
    words = _STATUS_WORDS[cell.status]
    return f"{words}: {cell.error}" if cell.status is CellStatus.FAILED else words


def _figures(cell: Cell) -> tuple[str, str, str, str]:
    if cell.status is not CellStatus.DONE or cell.figures is None:
        return "", "", "", ""
    return (
        format_bytes(cell.figures.peak_bytes),
        format_bytes(cell.reserved_bytes) if cell.reserved_bytes is not None else _NO_FIGURE,
        f"{1000 * cell.step_seconds:.1f} ms" if cell.step_seconds is not None else _NO_FIGURE,
        f"{cell.tokens_per_second:,.0f}" if cell.tokens_per_second is not None else _NO_FIGURE,
    )


def _so_far(recipe: TrainingRecipe, cells: Mapping[str, Cell]) -> str:
    cell = cells.get(cell_key(recipe))
    return "to run" if cell is None else cell.status.value


class PlainWatcher:
    """Prints a sweep's progress line by line, for a stderr that is not a terminal."""

    def __init__(self, say: Callable[[str], None], distinguishing: Iterable[str]) -> None:
        """Args: say: prints a line; distinguishing: options that distinguish the cells."""
        self._say, self._distinguishing = say, tuple(distinguishing)
        self._expected = self._ended = 0
        self._clock = RemainingTime()

    def expect(self, count: int) -> None:
        """Count cells that are to run."""
        self._expected += count

    def working(self, recipe: TrainingRecipe, words: str) -> None:
        """Print nothing: it is called several times per second."""

    def ended(self, cell: Cell) -> None:
        """Print one line per cell."""
        self._ended += 1
        self._clock.ended()
        left = self._clock.text(self._expected - self._ended)
        peak = f", peak {_figures(cell)[0]}" if cell.status is CellStatus.DONE else ""
        name = describe(cell.recipe, self._distinguishing)
        self._say(f"{self._ended}/{self._expected} {name}: {end_words(cell)}{peak}; {left}")


class BarWatcher:
    """A progress bar with the running cell and the time left."""

    def __init__(self, progress: "Progress", distinguishing: Iterable[str]) -> None:
        """Args: progress: rich's, with a field `left`; distinguishing: options that distinguish the cells."""
        self._progress, self._distinguishing = progress, tuple(distinguishing)
        self._task = progress.add_task("starting", total=0, left="")
        self._expected = self._ended = 0
        self._clock = RemainingTime()

    def expect(self, count: int) -> None:
        """Lengthen the bar."""
        self._expected += count
        self._progress.update(self._task, total=self._expected)

    def working(self, recipe: TrainingRecipe, words: str) -> None:
        """Show the running cell and its last line."""
        from rich.markup import escape

        text = escape(f"{describe(recipe, self._distinguishing)}: {words}")
        left = self._clock.text(self._expected - self._ended)
        self._progress.update(self._task, description=text, left=left)

    def ended(self, cell: Cell) -> None:
        """Advance the bar."""
        from rich.markup import escape

        self._ended += 1
        self._clock.ended()
        self._progress.update(self._task, completed=self._ended)
        if cell.status is CellStatus.FAILED:
            self._progress.console.print(escape(f"{describe(cell.recipe, self._distinguishing)}: {end_words(cell)}"))


def progress_bar() -> "Progress":
    """The bar of a sweep, on stderr; the description is cut to the width that is left."""
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


class RemainingTime:
    """The time that the remaining cells take, from the mean of those that have ended."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Args: now: a clock in seconds."""
        self._now = now
        self._started = self._last_end = now()
        self._ended = 0

    def ended(self) -> None:
        """Count a cell."""
        self._ended += 1
        self._last_end = self._now()

    def text(self, remaining: int) -> str:
        """Such as `about 4 min left`; the number of cells until one has ended.

        Args:
            remaining: cells that have not ended, including running ones.
        """
        if not self._ended or remaining <= 0:
            return f"{max(remaining, 0)} left"
        a_cell = (self._last_end - self._started) / self._ended
        seconds = max(a_cell * remaining - (self._now() - self._last_end), 0.0)
        return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"
