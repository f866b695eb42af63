"""The tables of a study's report, in Markdown."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ligerprof.analyzers.estimate import estimated_peak_bytes
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.reports.study.found import Found, minutes_apart
from ligerprof.reports.study.quantities import gib, in_table, peak_bytes, percent, role_bytes, value_of
from ligerprof.reports.study.texts import Texts
from ligerprof.roles import Role
from ligerprof.runs.study.outline import Borders, Column, Conditions, Estimates, Roles, Rows, Table
from ligerprof.runs.sweep.borders import edges
from ligerprof.runs.sweep.cells import Cell, CellStatus
from ligerprof.runs.sweep.grid import AXES, KERNEL_OPTIONS, distinguishing_options, option_text
from ligerprof.units import format_mib

# above a size that was out of memory, and not run for that
BEYOND = "\N{EN DASH}"
Where = Mapping[str, Any]


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table and an empty line; columns but the first are aligned to the right."""
    rule = ["---", *["---:"] * (len(headings) - 1)]
    return [*(f"| {' | '.join(cells)} |" for cells in (headings, rule, *rows)), ""]


def cell_table(found: Found, texts: Texts, table: Table, where: Where) -> tuple[list[str], list[Cell]]:
    """A table of cells, and the cells that it shows; both empty if it has fewer rows than it should.

    Args:
        where: conditions of the section.
    """
    columns = table.columns or tuple(
        Column(title=found.kernel_title(name), show=table.show, where=Conditions(kernels=(name,)))
        for name in table.kernels
    )
    rows, shown = [], []
    for title, place in _places(found, table.rows, where):
        row = [_Entry(found, column, {**where, **place}) for column in columns]
        cells = [entry.cell for entry in row if entry.cell is not None]
        if cells and (all(entry.is_complete for entry in row) or not table.complete):
            rows.append([title, *(entry.text(cells) for entry in row)])
            shown += cells
    if len(rows) < table.least:
        return [], []
    caption = texts.fill(table.caption, minutes=minutes_apart(shown))
    lines = markdown_table([table.rows.heading, *(column.title for column in columns)], rows)
    return [*([caption, ""] if caption else []), *lines], shown


class _Entry:
    """What stands in one row and column."""

    def __init__(self, found: Found, column: Column, where: Where) -> None:
        """Find the cell, and the one it is compared with."""
        self._found, self._column, self._where = found, column, {**where, **column.where}
        self.cell = None if column.show == "minutes" else found.find(self._where)
        self._other = None if column.against is None else found.find({**self._where, **column.against})

    @property
    def is_complete(self) -> bool:
        """Whether the figure is there, and the one it is compared with."""
        column = self._column
        compared = [self.cell] if column.against is None else [self.cell, self._other]
        return column.show == "minutes" or all(value_of(cell, column.show) is not None for cell in compared)

    def text(self, row: Sequence[Cell]) -> str:
        """Args: row: the cells of the row."""
        show = self._column.show
        if show == "minutes":
            minutes = minutes_apart(row)
            return "" if minutes is None else f"{minutes}"
        if self._column.against is not None:
            value, other = value_of(self.cell, show), value_of(self._other, show)
            return percent(value / other) if value and other and self.cell is not self._other else ""
        if self.cell is None and self._found.is_above_oom(self._where):
            return BEYOND
        return in_table(self.cell, show)


def _places(found: Found, rows: Rows, where: Where) -> list[tuple[str, dict[str, Any]]]:
    """Title and conditions of each row."""
    if rows.by == "kernels":
        names = rows.values or tuple(found.study.kernels)
        return [(found.kernel_title(str(name)), {"kernels": (name,)}) for name in names]
    if rows.by != "size":
        sizes = rows.values or sorted({getattr(cell.recipe, rows.by) for cell in found.select({**where, **rows.where})})
        return [(f"{size:,}", {rows.by: (size,)}) for size in sizes]
    recipes = [cell.recipe for cell in found.select({**where, **rows.where})]
    pairs = sorted({(recipe.tokens, recipe.batch, recipe.seq) for recipe in recipes})
    return [(f"{batch} x {seq:,}", {"batch": (batch,), "seq": (seq,)}) for _, batch, seq in pairs]


def borders_table(found: Found, borders: Borders, where: Where) -> list[str]:
    """The largest size that ran on each line, and the smallest that did not."""
    rows = []
    for line in borders.lines:
        for name in borders.kernels:
            cells = found.select({**where, **line.where, "kernels": (name,)})
            largest, smallest = edges(cells, line.axis)
            if cells:
                ran = "none" if largest is None else f"{largest:,}"
                lost = "not reached" if smallest is None else f"{smallest:,}"
                rows.append([line.title, found.kernel_title(name), ran, lost])
    headings = ["border of", "kernels", "largest that ran", "smallest out of memory"]
    return markdown_table(headings, rows) if rows else []


def roles_table(found: Found, roles: Roles, where: Where) -> tuple[list[str], list[Cell]]:
    """Bytes by role at the peak of each step, and the steps."""
    columns = [
        (f"{size:,}, {found.kernel_title(name)}", cell)
        for size in roles.values
        for name in roles.kernels
        if (cell := found.find({**where, roles.axis: (size,), "kernels": (name,)})) is not None
        if cell.status is CellStatus.DONE
    ]
    cells = [cell for _, cell in columns]
    rows = [
        [role.value, *(format_mib(role_bytes(cell, role)) for cell in cells)]
        for role in Role
        if any(role_bytes(cell, role) >= roles.least_share * peak_bytes(cell) for cell in cells)
    ]
    rows.append(["all roles", *(format_mib(peak_bytes(cell)) for cell in cells)])
    headings = ["role", *(title for title, _ in columns)]
    return ([roles.caption, "", *markdown_table(headings, rows)], cells) if cells else ([], [])


def estimates_table(found: Found, estimates: Estimates) -> tuple[list[str], list[Cell]]:
    """The estimated peak of each step next to its own, and the steps."""
    done = [cell for cell in found.select(estimates.where) if value_of(cell, "peak") is not None]
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
    lines = [
        f"Over {len(known)} steps the estimate is {summary}.{without}",
        "",
        "<details><summary>Every step</summary>",
        "",
    ]
    lines += [*markdown_table(["step", "peak, GiB", "estimate, GiB", "error"], rows), "</details>", ""]
    return lines, done


def _names(recipes: Sequence[TrainingRecipe], found: Found) -> Callable[[Cell], str]:
    """How a step is called: model, size, kernels, and other options that differ and are not at their default."""
    others = [name for name in distinguishing_options(recipes) if name not in ("model", *AXES, *KERNEL_OPTIONS)]
    plain = TrainingRecipe()

    def name(cell: Cell) -> str:
        recipe = cell.recipe
        told = [option_text(recipe, one) for one in others if getattr(recipe, one) != getattr(plain, one)]
        return ", ".join([recipe.spec.name, f"{recipe.batch} x {recipe.seq:,}", found.title(recipe), *told])

    return name
