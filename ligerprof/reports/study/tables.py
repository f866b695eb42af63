"""The tables of a study's report, in Markdown."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ligerprof.analyzers.estimate import estimated_peak_bytes
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.reports.study.found import (
    Found,
    Where,
    figure_text,
    gib,
    minutes_apart,
    peak_bytes,
    percent,
    role_bytes,
    value_of,
)
from ligerprof.reports.study.texts import Texts
from ligerprof.roles import Role
from ligerprof.runs.study.outline import Column, Conditions, Table
from ligerprof.runs.sweep.cells import Cell, CellStatus
from ligerprof.runs.sweep.grid import AXES, KERNEL_OPTIONS, distinguishing_options, option_text
from ligerprof.runs.sweep.runner import edges
from ligerprof.units import format_mib

OUT_OF_MEMORY = "OOM"
# above a size that was out of memory, and not run for that reason
BEYOND = "\N{EN DASH}"
# roles below this share of every peak have no row
_LEAST_ROLE_SHARE = 0.005

# headings, the entries of each row, and the cells that they show
_Rows = tuple[list[str], list[list[str]], list[Cell]]


def draw_table(found: Found, texts: Texts, table: Table, where: Where) -> tuple[list[str], list[Cell]]:
    """A table and the cells that it shows; both are empty if the table has fewer rows than `least`.

    Args:
        where: conditions of the section.
    """
    if table.by == "line":
        headings, rows, shown = _borders(found, table, where)
    elif table.by == "role":
        headings, rows, shown = _roles(found, table, where)
    elif table.by == "step":
        return _estimates(found, {**where, **table.where})
    else:
        headings, rows, shown = _figures(found, table, where)
    if len(rows) < table.least:
        return [], []
    caption = texts.fill(table.caption, minutes=minutes_apart(shown))
    return [*([caption, ""] if caption else []), *markdown_table(headings, rows)], shown


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table and an empty line; columns but the first are aligned to the right."""
    rule = ["---", *["---:"] * (len(headings) - 1)]
    return [*(f"| {' | '.join(cells)} |" for cells in (headings, rule, *rows)), ""]


def _figures(found: Found, table: Table, where: Where) -> _Rows:
    columns = table.columns or tuple(
        Column(title=found.study.kernels[name].title, show=table.show, where=Conditions(kernels=(name,)))
        for name in table.kernels
    )
    rows, shown = [], []
    for title, place in _places(found, table, where):
        row = [_Entry(found, column, {**where, **place}) for column in columns]
        cells = [entry.cell for entry in row if entry.cell is not None]
        if cells and (all(entry.is_complete for entry in row) or not table.complete):
            rows.append([title, *(entry.text(cells) for entry in row)])
            shown += cells
    return [table.heading or table.by, *(column.title for column in columns)], rows, shown


class _Entry:
    """The figure in one row and column."""

    def __init__(self, found: Found, column: Column, where: Where) -> None:
        self._found, self._column, self._where = found, column, {**where, **column.where}
        self.cell = None if column.show == "minutes" else found.find(self._where)
        self._compared = None if column.against is None else found.find({**self._where, **column.against})

    @property
    def is_complete(self) -> bool:
        """Whether the figure exists, and the one it is compared with."""
        show, against = self._column.show, self._column.against
        cells = [self.cell] if against is None else [self.cell, self._compared]
        return show == "minutes" or all(value_of(cell, show) is not None for cell in cells)

    def text(self, row: Sequence[Cell]) -> str:
        """The entry; `row` holds the cells of its row."""
        show, cell = self._column.show, self.cell
        value = value_of(cell, show)
        if show == "minutes":
            minutes = minutes_apart(row)
            text = "" if minutes is None else str(minutes)
        elif self._column.against is not None:
            other = value_of(self._compared, show)
            text = percent(value / other) if value and other and cell is not self._compared else ""
        elif cell is None:
            text = BEYOND if self._found.is_above_oom(self._where) else ""
        elif value is None:
            text = OUT_OF_MEMORY if cell.status is CellStatus.OOM else ""
        else:
            text = figure_text(value, show, gib)
            if show == "peak and reserved" and cell.reserved_bytes is not None:
                text += f" / {gib(cell.reserved_bytes)}"
        return text


def _places(found: Found, table: Table, where: Where) -> list[tuple[str, dict[str, Any]]]:
    """Title and conditions of each row."""
    if table.by == "kernels":
        return [(found.study.kernels[name].title, {"kernels": (name,)}) for name in table.kernels]
    recipes = [cell.recipe for cell in found.select({**where, **table.where})]
    if table.by == "size":
        pairs = sorted({(recipe.tokens, recipe.batch, recipe.seq) for recipe in recipes})
        return [(f"{batch} x {seq:,}", {"batch": (batch,), "seq": (seq,)}) for _, batch, seq in pairs]
    sizes = table.values or sorted({getattr(recipe, table.by) for recipe in recipes})
    return [(f"{size:,}", {table.by: (size,)}) for size in sizes]


def _borders(found: Found, table: Table, where: Where) -> _Rows:
    """The largest size that ran on each line, and the smallest that did not."""
    rows = []
    for line in table.lines:
        for name in table.kernels:
            cells = found.select({**where, **line.where, "kernels": (name,)})
            largest, smallest = edges(cells, line.axis)
            if cells:
                ran = "none" if largest is None else f"{largest:,}"
                lost = "not reached" if smallest is None else f"{smallest:,}"
                rows.append([line.title, found.study.kernels[name].title, ran, lost])
    return ["border of", "kernels", "largest that ran", "smallest out of memory"], rows, []


def _roles(found: Found, table: Table, where: Where) -> _Rows:
    """Bytes by role at the peak of each step."""
    headings, cells = ["role"], []
    for size in table.values:
        for name in table.kernels:
            cell = found.find({**where, table.axis: (size,), "kernels": (name,)})
            if cell is not None and cell.status is CellStatus.DONE:
                headings.append(f"{size:,}, {found.study.kernels[name].title}")
                cells.append(cell)
    rows = [
        [role.value, *(format_mib(role_bytes(cell, role)) for cell in cells)]
        for role in Role
        if any(role_bytes(cell, role) >= _LEAST_ROLE_SHARE * peak_bytes(cell) for cell in cells)
    ]
    rows.append(["all roles", *(format_mib(peak_bytes(cell)) for cell in cells)])
    return headings, rows if cells else [], cells


def _estimates(found: Found, where: Where) -> tuple[list[str], list[Cell]]:
    """The estimated peak of each step next to its own, with a summary."""
    done = [cell for cell in found.select(where) if value_of(cell, "peak") is not None]
    estimated = [(cell, estimated_peak_bytes(cell.recipe)) for cell in done]
    known = [(cell, size, size / peak_bytes(cell)) for cell, size in estimated if size is not None]
    if not known:
        return [], []
    name = _names([cell.recipe for cell in done], found)
    errors = [abs(ratio - 1) for *_, ratio in known]
    worst, *_ = max(known, key=lambda one: abs(one[2] - 1))
    rows = [[name(cell), gib(peak_bytes(cell)), gib(size), percent(ratio, 2)] for cell, size, ratio in known]
    without = f" {len(done) - len(known)} more steps cannot be estimated." if len(known) < len(done) else ""
    middle, most = (100 * error for error in (statistics.median(errors), max(errors)))
    summary = f"off by {middle:.2f} % in the median and by {most:.2f} % at worst ({name(worst)})"
    lines = [f"Over {len(known)} steps the estimate is {summary}.{without}", ""]
    details = markdown_table(["step", "peak, GiB", "estimate, GiB", "error"], rows)
    return [*lines, "<details><summary>Every step</summary>", "", *details, "</details>", ""], done


def _names(recipes: Sequence[TrainingRecipe], found: Found) -> Callable[[Cell], str]:
    """How to name a step: model, size, kernels, and other options that differ and are not at their default."""
    others = [name for name in distinguishing_options(recipes) if name not in ("model", *AXES, *KERNEL_OPTIONS)]
    defaults = TrainingRecipe()

    def name(cell: Cell) -> str:
        recipe = cell.recipe
        options = [option_text(recipe, one) for one in others if getattr(recipe, one) != getattr(defaults, one)]
        return ", ".join([recipe.spec.name, f"{recipe.batch} x {recipe.seq:,}", found.title(recipe), *options])

    return name
