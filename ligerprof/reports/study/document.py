"""Write a study's report: a Markdown file with the sections that its file outlines, and their figures."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ligerprof.files import require_absent, write_new_file
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.reports.study.found import Found, read_found
from ligerprof.reports.study.tables import BEYOND, OUT_OF_MEMORY, draw_table, markdown_table
from ligerprof.reports.study.texts import Texts
from ligerprof.reports.sweep import origin_words
from ligerprof.runs.study.outline import Figure, Part, Section, Study
from ligerprof.runs.sweep.cells import Cell, CellStatus
from ligerprof.runs.sweep.grid import cell_key, expand
from ligerprof.runs.sweep.runner import UNITS, is_beyond, line_edges
from ligerprof.units import size_text

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

    def __init__(self, found: Found, folder: Path, command: str) -> None:
        self._found, self._folder, self._command = found, folder, command
        self._texts = Texts(found)
        self._gaps = _find_gaps(found)

    def lines(self) -> Iterator[str]:
        """The whole file."""
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
        from ligerprof.reports.figures.kinds import KINDS, PlotInput, Sources
        from ligerprof.reports.figures.style import write_figure

        cells = shown if figure.where is None else self._found.select(figure.where)
        # nothing if the cells do not suffice for the figure
        for drawn in itertools.islice(KINDS[figure.kind].draw(PlotInput(sources=Sources(cells=cells))), 1):
            write_figure(drawn.figure, self._folder / f"{figure.name}.svg", force=True)
            yield from (f"![{figure.alt}]({figure.name}.svg)", "")


def _paragraphs(*texts: str) -> list[str]:
    return [line for text in texts if text for line in (" ".join(text.split()), "")]


def _find_gaps(found: Found) -> tuple[Gap, ...]:
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


def _steps(part: Part, found: Found, by_kernels: dict[str, list[TrainingRecipe]]) -> Iterator[Gap]:
    keys = {cell.key for cell in found.cells}
    for kernels, recipes in by_kernels.items():
        lacking = [one for one in recipes if cell_key(one) not in keys and not is_beyond(one, found.cells)]
        if lacking:
            measured = sum(cell_key(recipe) in keys for recipe in recipes)
            missing = ", ".join(f"{recipe.batch} x {recipe.seq:,}" for recipe in lacking)
            yield part.name, kernels, f"{measured} of {len(recipes)}", missing


def _searches(part: Part, found: Found, by_kernels: dict[str, list[TrainingRecipe]]) -> Iterator[Gap]:
    """The borders of a part that searches for them, if the two sizes around a border are not adjacent."""
    if part.find_limit is None:
        return
    for kernels, recipes in by_kernels.items():
        largest, smallest = line_edges(found.cells, recipes[0], part.find_limit)
        if largest is None or smallest is None or smallest - largest > UNITS[part.find_limit]:
            above = "" if largest is None else f" above {largest:,}"
            below = "" if smallest is None else f" below {smallest:,}"
            yield part.name, kernels, "", f"border{above}{below}"
