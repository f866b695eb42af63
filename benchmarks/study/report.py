"""Write a study's report: a Markdown file with the sections that its file outlines, and their figures."""

import itertools
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.study.grids import (
    Column,
    Conditions,
    Figure,
    KernelSet,
    Section,
    Study,
    StudyFileError,
    StudyPart,
    StudyTable,
    StudyValue,
    names_in,
)
from ligerprof.analyzers.estimate import estimated_peak_bytes
from ligerprof.errors import ResultFormatError
from ligerprof.files import require_absent, write_new_file
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.reports.sweep import origin_words
from ligerprof.roles import Role
from ligerprof.runs.sweep.cells import (
    AXES,
    KERNEL_OPTIONS,
    Cell,
    CellStatus,
    cell_key,
    distinguishing_options,
    expand,
    option_text,
    read_cells,
    read_rows,
    without_unused_options,
)
from ligerprof.runs.sweep.runner import UNITS, edges, is_beyond, line_edges
from ligerprof.torch_memory.dtypes import FP32_BYTES
from ligerprof.units import GIB, format_bytes, format_mib, size_text

Where = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyRows:
    """Result rows of a study; `versions` maps packages to their versions."""

    study: Study
    cells: tuple[Cell, ...]
    versions: Mapping[str, Iterable[str]]

    @property
    def limit_bytes(self) -> int | None:
        """The limit on reserved bytes, if all cells that have a limit have the same one."""
        return shared_limit_bytes(cell for cell in self.cells if cell.recipe.memory_limit_bytes is not None)

    def select(self, where: Where) -> tuple[Cell, ...]:
        """The cells that meet conditions, in the order of their rows."""
        conditions = {key: values for name in where.get("cells", ()) for key, values in self.study.cells[name].items()}
        conditions |= {key: values for key, values in where.items() if key != "cells"}
        sets = [self.study.kernels[name] for name in conditions.pop("kernels", ())]
        return tuple(cell for cell in self.cells if _meets(without_unused_options(cell.recipe), conditions, sets))

    def find(self, where: Where) -> Cell | None:
        """The first cell that meets conditions."""
        return next(iter(self.select(where)), None)

    def is_above_oom(self, where: Where) -> bool:
        """Whether a cell with the same conditions, no larger in batch and sequence, was out of memory."""
        sizes = {name: max(where[name]) for name in AXES if name in where}
        rest = {name: values for name, values in where.items() if name not in sizes}
        return any(
            cell.status is CellStatus.OOM and all(getattr(cell.recipe, name) <= size for name, size in sizes.items())
            for cell in self.select(rest)
        )

    def title(self, recipe: TrainingRecipe) -> str:
        """The kernels of a recipe as tables name them."""
        recipe = without_unused_options(recipe)
        for one in self.study.kernels.values():
            if _uses(recipe, one):
                return one.title
        default = recipe.provider_names == KernelSet(liger="").provider
        return recipe.liger if default else f"{recipe.liger}, {recipe.provider_names}"


def read_found(study: Study, paths: Sequence[Path]) -> StudyRows:
    """Read result files, or folders of sweeps; failed cells are left out, and of rows with one key the last counts.

    Raises:
        ResultFormatError: a file was not written by a sweep, or none of them contains a finished cell.
    """
    cells = tuple(cell for cell in read_cells(paths) if cell.status is not CellStatus.FAILED)
    if not cells:
        raise ResultFormatError("no finished cell of the study. Run `ligerprof study`, or name a file with --results.")
    versions: dict[str, dict[str, None]] = {}
    for _, row in itertools.chain.from_iterable(map(read_rows, paths)):
        for package, version in (row.get("versions") or {}).items():
            versions.setdefault(package, {})[str(version)] = None
    return StudyRows(study=study, cells=cells, versions=versions)


def minutes_apart(cells: Iterable[Cell]) -> int | None:
    """Minutes from the end of the first cell to that of the last; None if a row does not say when it ended."""
    ends = [cell.finished for cell in cells]
    known = [end for end in ends if end is not None]
    return round((max(known) - min(known)).total_seconds() / 60) if len(known) == len(ends) > 0 else None


def shared_limit_bytes(cells: Iterable[Cell]) -> int | None:
    """The cells' limit on reserved bytes; None if they have none or several."""
    limits = {cell.recipe.memory_limit_bytes for cell in cells}
    return limits.pop() if len(limits) == 1 else None


def peak_bytes(cell: Cell) -> int:
    """Peak allocated bytes; 0 if the row lacks them."""
    return cell.figures.peak_bytes if cell.figures is not None else 0


def role_bytes(cell: Cell, *roles: Role) -> int:
    """Bytes of roles at the peak; 0 if the row lacks them."""
    return sum(cell.figures.roles[role] for role in roles) if cell.figures is not None else 0


def value_of(cell: Cell | None, show: str) -> float | None:
    """A figure as a number; None if the step did not finish, or its row lacks the figure."""
    return _FIGURES[show][0](cell) if cell is not None and cell.status is CellStatus.DONE else None


def figure_text(value: float, show: str, size_text: Callable[[int], str]) -> str:
    """A figure in words; `size_text` formats sizes."""
    form = _FIGURES[show][1]
    return form.format(value) if form else size_text(round(value))


def gib(size_bytes: int) -> str:
    """A size in GiB, two digits, for a table whose heading has the unit."""
    return f"{size_bytes / GIB:.2f}"


def percent(ratio: float, digits: int = 1) -> str:
    """The difference of a ratio from one, with its sign unless it rounds to zero."""
    value = round(100 * (ratio - 1), digits)
    return f"{value:+.{digits}f} %" if value else f"{0:.{digits}f} %"


def _loss_bytes(cell: Cell) -> int:
    return role_bytes(cell, Role.LOGITS, Role.SHIFT_LOGITS, Role.CE_TEMPORARIES)


def _logits_bytes(cell: Cell) -> int:
    """One [T, V] logits tensor in fp32."""
    return cell.recipe.tokens * cell.recipe.spec.vocab_size * FP32_BYTES


# how to compute each figure of a finished step, and its format; sizes have none
_FIGURES: Mapping[str, tuple[Callable[[Cell], float | None], str]] = {
    "peak": (lambda cell: peak_bytes(cell) or None, ""),
    "peak and reserved": (lambda cell: peak_bytes(cell) or None, ""),
    "tokens/s": (lambda cell: cell.tokens_per_second, "{:,.0f}"),
    "loss": (_loss_bytes, ""),
    "loss share": (lambda cell: 100 * _loss_bytes(cell) / max(peak_bytes(cell), 1), "{:.0f} %"),
    "loss in logits": (lambda cell: _loss_bytes(cell) / _logits_bytes(cell), "{:.2f} x"),
    "logits": (_logits_bytes, ""),
    # between several steps
    "minutes": (lambda _: None, ""),
}


def _meets(recipe: TrainingRecipe, conditions: Where, sets: Sequence[KernelSet]) -> bool:
    values = {name: recipe.spec.name if name == "model" else getattr(recipe, name) for name in conditions}
    return all(values[name] in allowed for name, allowed in conditions.items()) and (
        not sets or any(_uses(recipe, one) for one in sets)
    )


def _uses(recipe: TrainingRecipe, kernels: KernelSet) -> bool:
    return all(getattr(recipe, name) == value for name, value in kernels.options.items())


# a piece of a text that is left out if one of its values is unknown
_OPTIONAL = re.compile(r"\[\[(.*?)\]\]", re.DOTALL)


class Texts:
    """Fills in the texts of a study; `values` holds None for values that the rows do not provide."""

    def __init__(self, found: StudyRows) -> None:
        self.values = {name: _value(found, value) for name, value in found.study.values.items()}

    def fill(self, text: str, **local: Any) -> str:
        """A text with its values; empty if one outside of `[[...]]` is unknown.

        Args:
            local: values for this text only.

        Raises:
            StudyFileError: a value does not support its format specification.
        """
        values = {**self.values, **local}
        # every second piece was in [[ ]]
        pieces = [_fill(piece, values) for piece in _OPTIONAL.split(text)]
        return "".join(piece or "" for piece in pieces) if None not in pieces[::2] else ""


def _fill(text: str, values: Mapping[str, Any]) -> str | None:
    if any(values[name] is None for name in names_in(text)):
        return None
    try:
        return text.format_map(values)
    except (ValueError, LookupError, AttributeError) as error:
        raise StudyFileError(f"{text!r:.60}: {error}.") from None


def _value(found: StudyRows, value: StudyValue) -> int | str | None:
    cells = found.select(value.where)
    if value.find in ("largest", "smallest-oom"):
        return edges(cells, value.axis)[value.find == "smallest-oom"]
    if value.find == "limit":
        limit_bytes = shared_limit_bytes(cells)
        return None if limit_bytes is None else format_bytes(limit_bytes)
    if value.find == "spread":
        return _spread(sorted(_ratios(found, value, cells)))
    if value.find == "end":
        return value.words.get(cells[0].status.value) if cells else None
    figure = value_of(cells[0], value.show) if cells else None
    other = 0.0 if value.against is None else value_of(found.find({**value.where, **value.against}), value.show)
    return None if figure is None or other is None else figure_text(figure - other, value.show, format_bytes)


def _spread(ratios: list[float]) -> str | None:
    """Such as `-6.6 % to +3.0 %, -0.9 % in the median of 15 sizes`."""
    if not ratios:
        return None
    ends = f"{percent(ratios[0])} to {percent(ratios[-1])}"
    return f"{ends}, {percent(statistics.median(ratios))} in the median of {len(ratios)} sizes"


def _ratios(found: StudyRows, value: StudyValue, cells: tuple[Cell, ...]) -> Iterator[float]:
    """Each cell's figure over that of the cell of the same size that `against` selects."""
    for cell in cells:
        size: dict[str, Any] = {name: (getattr(cell.recipe, name),) for name in AXES}
        other = found.find({**value.where, **(value.against or {}), **size})
        figure, reference = value_of(cell, value.show), value_of(other, value.show)
        if other is not None and figure and reference and _is_in_span(value, minutes_apart((cell, other))):
            yield figure / reference


def _is_in_span(value: StudyValue, minutes: int | None) -> bool:
    if value.within_minutes is not None:
        return minutes is not None and minutes <= value.within_minutes
    return value.beyond_minutes is None or minutes is None or minutes > value.beyond_minutes


OUT_OF_MEMORY = "OOM"
# above a size that was out of memory, and not run for that reason
BEYOND = "\N{EN DASH}"
# roles below this share of every peak have no row
_LEAST_ROLE_SHARE = 0.005

# headings, the entries of each row, and the cells that they show
_Rows = tuple[list[str], list[list[str]], list[Cell]]


def draw_table(found: StudyRows, texts: Texts, table: StudyTable, where: Where) -> tuple[list[str], list[Cell]]:
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


def _figures(found: StudyRows, table: StudyTable, where: Where) -> _Rows:
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

    def __init__(self, found: StudyRows, column: Column, where: Where) -> None:
        self._found, self._column, self._where = found, column, {**where, **column.where}
        self.cell = None if column.show == "minutes" else found.find(self._where)
        self._compared = None if column.against is None else found.find({**self._where, **column.against})

    @property
    def is_complete(self) -> bool:
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


def _places(found: StudyRows, table: StudyTable, where: Where) -> list[tuple[str, dict[str, Any]]]:
    if table.by == "kernels":
        return [(found.study.kernels[name].title, {"kernels": (name,)}) for name in table.kernels]
    recipes = [cell.recipe for cell in found.select({**where, **table.where})]
    if table.by == "size":
        pairs = sorted({(recipe.tokens, recipe.batch, recipe.seq) for recipe in recipes})
        return [(f"{batch} x {seq:,}", {"batch": (batch,), "seq": (seq,)}) for _, batch, seq in pairs]
    sizes = table.values or sorted({getattr(recipe, table.by) for recipe in recipes})
    return [(f"{size:,}", {table.by: (size,)}) for size in sizes]


def _borders(found: StudyRows, table: StudyTable, where: Where) -> _Rows:
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


def _roles(found: StudyRows, table: StudyTable, where: Where) -> _Rows:
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


def _estimates(found: StudyRows, where: Where) -> tuple[list[str], list[Cell]]:
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


def _names(recipes: Sequence[TrainingRecipe], found: StudyRows) -> Callable[[Cell], str]:
    """How to name a step: model, size, kernels, and other options that differ and are not at their default."""
    others = [name for name in distinguishing_options(recipes) if name not in ("model", *AXES, *KERNEL_OPTIONS)]
    defaults = TrainingRecipe()

    def name(cell: Cell) -> str:
        recipe = cell.recipe
        options = [option_text(recipe, one) for one in others if getattr(recipe, one) != getattr(defaults, one)]
        return ", ".join([recipe.spec.name, f"{recipe.batch} x {recipe.seq:,}", found.title(recipe), *options])

    return name


NAME = "README.md"
_GAPS = "Not measured yet"
# part, kernel set, how many of its steps have rows, and what is missing
Gap = tuple[str, str, str, str]


def write_report(study: Study, paths: Sequence[Path], folder: Path, *, command: str, force: bool) -> Path:
    """Write README.md and its figures, one SVG each, into a folder.

    Args:
        paths: result files, or folders of sweeps; of two rows of one cell the last counts.
        command: the command that runs the study, such as `ligerprof study`.

    Raises:
        OutputError: the report exists, or cannot be written.
        ResultFormatError: a file was not written by a sweep, or none contains a finished cell.
        StudyFileError: a text of the study cannot be filled in.
    """
    target = folder / NAME
    require_absent([target], force=force)
    report = _Report(read_found(study, paths), folder, command)
    write_new_file(target, "\n".join(report.lines()).rstrip() + "\n", force=force)
    return target


class _Report:
    """The lines of the report; figures are written as the lines that show them are generated."""

    def __init__(self, found: StudyRows, folder: Path, command: str) -> None:
        self._found, self._folder, self._command = found, folder, command
        self._texts = Texts(found)
        self._gaps = _find_gaps(found)

    def lines(self) -> Iterator[str]:
        study = self._found.study
        yield from (f"# {study.title}", "")
        yield from _paragraphs(self._texts.fill(study.text), self._origin())
        link = f"[{_GAPS}](#{_GAPS.lower().replace(' ', '-')})"
        missing = [f"{link}, or only in part: {_gaps_in_words(self._gaps)}."] if self._gaps else []
        yield from self._claims(study.claims, missing)
        yield from _paragraphs(self._legend())
        for section in study.sections:
            yield from self._section(section)
        if self._gaps:
            yield from self._gaps_section()

    def _origin(self) -> str:
        found = self._found
        versions = ", ".join(f"{package} {' and '.join(known)}" for package, known in found.versions.items())
        gpus = {(cell.figures.backend, cell.gpu): None for cell in found.cells if cell.figures is not None}
        origin = " and ".join(origin_words(backend, gpu) for backend, gpu in gpus)
        lost = sum(cell.status is CellStatus.OOM for cell in found.cells)
        dates = sorted({cell.finished.date().isoformat() for cell in found.cells if cell.finished is not None})
        days = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "on an unknown day"
        return f"{len(found.cells)} steps, {lost} of them out of memory, {origin}, {days}, with {versions}."

    def _legend(self) -> str:
        blank = "; blank: not measured yet" if self._gaps else ""
        return (
            f"`{self._command}` runs the study again, and `{self._command} --report` writes this page. Every figure in "
            f"it comes from result files, except for the estimates. {OUT_OF_MEMORY}: out of memory; {BEYOND}: not run, "
            f"since a smaller size in the same column was out of memory{blank}. Peak is the most that was allocated in "
            "a steady step, reserved the most that torch's allocator reserved for it."
        )

    def _section(self, section: Section) -> Iterator[str]:
        if any(self._texts.values[name] is None for name in section.needs):
            return
        lines: list[str] = []
        cells: dict[str, Cell] = {}
        for table in section.tables:
            more, shown = draw_table(self._found, self._texts, table, section.where)
            lines += more
            cells |= {cell.key: cell for cell in shown}
        lines += _paragraphs(*(self._texts.fill(note) for note in section.notes))
        lines += self._claims(section.claims)
        if lines:
            yield from (f"## {section.title}", "")
            yield from _paragraphs(self._texts.fill(section.text))
            yield from lines
            for figure in section.figures:
                yield from self._figure(figure, tuple(cells.values()))

    def _gaps_section(self) -> Iterator[str]:
        """One row per part and kernel set, and the command that runs what is missing."""
        yield from (f"## {_GAPS}", "", "The study's parts ask for these steps, and no row holds them:", "")
        yield from markdown_table(["part", "kernels", "measured", "not measured yet, batch x sequence"], self._gaps)
        parts = ",".join(dict.fromkeys(part for part, *_ in self._gaps))
        limit_bytes = self._found.limit_bytes
        own = {limit for part in self._found.study.parts for limit in part.options.get("memory_limit_bytes", ())}
        limit = "" if limit_bytes is None or limit_bytes in own else f" --memory-limit {size_text(limit_bytes)}"
        yield from ("In a folder whose `results.jsonl` holds the rows of this report, this runs what is missing:", "")
        yield from ("```", f"{self._command} --only {parts}{limit} -o FOLDER", "```", "")

    def _claims(self, claims: Sequence[str], more: Sequence[str] = ()) -> list[str]:
        filled = [*filter(None, map(self._texts.fill, claims)), *more]
        return [*(f"- {claim}" for claim in filled), ""] if filled else []

    def _figure(self, figure: Figure, shown: tuple[Cell, ...]) -> Iterator[str]:
        from ligerprof.reports.figures.kinds import KINDS, Sources
        from ligerprof.reports.figures.style import write_figure

        cells = shown if figure.where is None else self._found.select(figure.where)
        # nothing if the cells do not suffice for the figure
        for drawn in itertools.islice(KINDS[figure.kind].draw(Sources(cells=cells)), 1):
            write_figure(drawn.figure, self._folder / f"{figure.name}.svg", force=True)
            yield from (f"![{figure.alt}]({figure.name}.svg)", "")


def _paragraphs(*texts: str) -> list[str]:
    return [line for text in texts if text for line in (" ".join(text.split()), "")]


def _find_gaps(found: StudyRows) -> tuple[Gap, ...]:
    """What is missing, in the study's order; steps above one that was out of memory do not count."""
    gaps: list[Gap] = []
    for part in found.study.parts:
        # on the device and under the limit of the rows
        grid = found.study.grid(part, device=found.cells[0].recipe.device, memory_limit_bytes=found.limit_bytes)
        by_kernels: dict[str, list[TrainingRecipe]] = {}
        for recipe in expand([grid], lambda _: None)[0]:
            by_kernels.setdefault(found.title(recipe), []).append(recipe)
        gaps += _steps(part, found, by_kernels)
        gaps += _searches(part, found, by_kernels)
    return tuple(gaps)


def _gaps_in_words(gaps: Iterable[Gap]) -> str:
    """The parts with the kernel sets that lack something, such as `paper (none; all)`."""
    kernels: dict[str, list[str]] = {}
    for part, name, *_ in gaps:
        kernels.setdefault(part, []).append(name)
    return ", ".join(f"{part} ({'; '.join(names)})" for part, names in kernels.items())


def _steps(part: StudyPart, found: StudyRows, by_kernels: dict[str, list[TrainingRecipe]]) -> Iterator[Gap]:
    keys = {cell.key for cell in found.cells}
    for kernels, recipes in by_kernels.items():
        lacking = [one for one in recipes if cell_key(one) not in keys and not is_beyond(one, found.cells)]
        if lacking:
            measured = sum(cell_key(recipe) in keys for recipe in recipes)
            missing = ", ".join(f"{recipe.batch} x {recipe.seq:,}" for recipe in lacking)
            yield part.name, kernels, f"{measured} of {len(recipes)}", missing


def _searches(part: StudyPart, found: StudyRows, by_kernels: dict[str, list[TrainingRecipe]]) -> Iterator[Gap]:
    """The borders of a part that searches for them, if the two sizes around a border are not adjacent."""
    if part.find_limit is None:
        return
    for kernels, recipes in by_kernels.items():
        largest, smallest = line_edges(found.cells, recipes[0], part.find_limit)
        if largest is None or smallest is None or smallest - largest > UNITS[part.find_limit]:
            above = "" if largest is None else f" above {largest:,}"
            below = "" if smallest is None else f" below {smallest:,}"
            yield part.name, kernels, "", f"border{above}{below}"
