"""Write a study's report: a Markdown file with the sections that its file outlines, and their figures."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from ligerprof.files import require_absent, write_new_file
from ligerprof.reports.study.found import Found, read_found
from ligerprof.reports.study.gaps import find_gaps, gaps_in_words, gaps_section
from ligerprof.reports.study.tables import BEYOND, OUT_OF_MEMORY, draw_table
from ligerprof.reports.study.texts import Texts
from ligerprof.runs.study.outline import Figure, Section, Study
from ligerprof.runs.sweep.cells import Cell, CellStatus

NAME = "README.md"
_GAPS = "Not measured yet"


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
        self._gaps = find_gaps(found)

    def lines(self) -> Iterator[str]:
        """The whole file."""
        study = self._found.study
        yield from (f"# {study.title}", "")
        yield from _paragraphs(self._texts.fill(study.text), self._origin())
        link = f"[{_GAPS}](#{_GAPS.lower().replace(' ', '-')})"
        missing = [f"{link}, or only in part: {gaps_in_words(self._gaps)}."] if self._gaps else []
        yield from self._claims(study.claims, missing)
        yield from _paragraphs(self._legend())
        for section in study.sections:
            yield from self._section(section)
        if self._gaps:
            yield from (f"## {_GAPS}", "", "The study's parts ask for these steps, and no row holds them:", "")
            yield from gaps_section(self._found, self._gaps, self._command)

    def _origin(self) -> str:
        found = self._found
        versions = ", ".join(f"{package} {version}" for package, version in found.versions)
        lost = sum(cell.status is CellStatus.OOM for cell in found.cells)
        days = " to ".join(dict.fromkeys((found.days[0], found.days[-1]))) if found.days else "on an unknown day"
        return f"{len(found.cells)} steps, {lost} of them out of memory, {found.origin}, {days}, with {versions}."

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

    def _claims(self, claims: Sequence[str], more: Sequence[str] = ()) -> list[str]:
        filled = [*filter(None, map(self._texts.fill, claims)), *more]
        return [*(f"- {claim}" for claim in filled), ""] if filled else []

    def _figure(self, figure: Figure, shown: tuple[Cell, ...]) -> Iterator[str]:
        from ligerprof.reports.figures.kinds import KINDS, PlotInput
        from ligerprof.reports.figures.sources import Sources
        from ligerprof.reports.figures.style import write_figure

        cells = shown if figure.where is None else self._found.select(figure.where)
        # nothing if the cells do not suffice for the figure
        for drawn in itertools.islice(KINDS[figure.kind].draw(PlotInput(sources=Sources(cells=cells))), 1):
            write_figure(drawn.figure, self._folder / f"{figure.name}.svg", force=True)
            yield from (f"![{figure.alt}]({figure.name}.svg)", "")


def _paragraphs(*texts: str) -> list[str]:
    return [line for text in texts if text for line in (" ".join(text.split()), "")]
