"""Terminal tables and commands: no markup, no control characters, no cut value; tables of roles and phases."""

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from ligerprof.roles import MemoryBreakdown, Phase, Role, shown_phases
from ligerprof.text import printable
from ligerprof.units import format_mib, prints_as_zero

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table
    from rich.text import Text


# a blank between a number and its unit, at which no line breaks; a private character, one column wide, replaces it
_BLANK = re.compile(r"(?<=[0-9]) (?=(?:[KMGT]?i?B|%|m?s)(?![\w]))")
_NO_BREAK = "\ue000"
_LEAST_WIDTH = 16


class PlainConsole(Console):
    """Prints every string and every `Text` escaped, wherever it is in a table or a group."""

    def __init__(self, *, file: IO[str], width: int | None = None, **options: Any) -> None:
        super().__init__(file=file, width=width, highlight=False, soft_wrap=False, markup=False, emoji=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; a table that needs more than the width is not cropped."""
        super().print(*objects, **{"crop": False, **options})

    def render_str(self, text: str, **options: Any) -> Text:
        """Turn a string into a `Text`."""
        return super().render_str(printable(text, keep="\n"), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render a part of the output."""
        if isinstance(renderable, Text) and not renderable.plain.isprintable():
            renderable = _escaped(renderable)
        if not isinstance(renderable, Text) or (options or self.options).max_width < _LEAST_WIDTH:
            return super().render(renderable, options)
        kept = renderable.copy()
        kept.plain = _BLANK.sub(_NO_BREAK, kept.plain)
        rendered = super().render(kept, options)
        return (segment._replace(text=segment.text.replace(_NO_BREAK, " ")) for segment in rendered)


def _escaped(text: Text) -> Text:
    plain = printable(text.plain, keep="\n")
    if plain == text.plain:
        return text
    # the styles of parts are lost, since their places change
    return Text(plain, style=text.style, justify=text.justify, overflow=text.overflow, no_wrap=text.no_wrap)


# a cell that may wrap gets at least its longest word, up to this many columns
_LONGEST_WORD = 28
_LEAST_CELL_WIDTH = 12
_INDENT = 2
_UNBOUNDED = 10**6


class WholeTable(Table):
    """A table without vertical lines.

    Columns without `no_wrap` may wrap between words. If the console is too narrow for the other columns and for the
    words of these, each row becomes a block: its first cell, then a line with its heading for every other cell.
    Output to a file or pipe is as wide as the table needs, unless COLUMNS is set.
    """

    def __init__(self) -> None:
        super().__init__(box=box.SIMPLE_HEAD, pad_edge=False)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the rows, or their blocks."""
        if not self.columns:
            return
        aligned, needed, wanted = self._sized(console, options, aligned=True)
        free = options.max_width - sum(needed) - self._extra_width
        if free < 0 and not console.is_terminal and "COLUMNS" not in os.environ:
            width = options.max_width - free
            options, free = options.update(max_width=width, width=width), 0
        if free < 0:
            aligned, needed, wanted = self._sized(console, options, aligned=False)
            free = options.max_width - sum(needed) - self._extra_width
        if free < 0:
            yield from self._blocks(console, options)
            return
        for index, width in enumerate(_shared_out(needed, wanted, free)):
            aligned.columns[index].width = width - self._get_padding_width(index)
        yield from Table.__rich_console__(aligned, console, options)

    def _sized(
        self, console: Console, options: ConsoleOptions, *, aligned: bool
    ) -> tuple["WholeTable", list[int], list[int]]:
        """A copy whose columns can be resized, and the least and the largest width of each, with its padding.

        Args:
            aligned: whether to keep the minimum widths, which align the columns of several tables.
        """
        table = copy(self)
        table.columns = [copy(column) for column in self.columns]
        for column in table.columns:
            column.width = None
            column.min_width = column.min_width if aligned else None
        return table, *table._widths(console, options.update(max_width=_UNBOUNDED, width=_UNBOUNDED))

    def _widths(self, console: Console, options: ConsoleOptions) -> tuple[list[int], list[int]]:
        """The least and the largest width of each column, with its padding."""
        found = [self._measure_column(console, options, column) for column in self.columns]
        needed = [
            each.maximum if column.no_wrap else min(each.minimum, _LONGEST_WORD + self._get_padding_width(index))
            for index, (column, each) in enumerate(zip(self.columns, found, strict=True))
        ]
        return needed, [each.maximum for each in found]

    def _blocks(self, console: Console, options: ConsoleOptions) -> RenderResult:
        headings = [_text(console, column.header) for column in self.columns[1:]]
        rows = zip(*(column.cells for column in self.columns), strict=True)
        width = max((heading.cell_len for heading in headings), default=0)
        room = options.max_width - _INDENT - width - _INDENT
        yield Text()
        above: RenderableType = ""
        for first, *cells in rows:
            # a blank first cell repeats the one above
            above = first if _text(console, first).plain.strip() else above
            yield from _folded(self._title(console, above), 0)
            for heading, cell in zip(headings, cells, strict=True):
                text = _text(console, cell)
                if not text.plain.strip():
                    continue
                if not heading.plain.strip():
                    yield from _folded(text, _INDENT)
                elif room >= _LEAST_CELL_WIDTH and room >= max(map(len, text.plain.split())):
                    grid = Table.grid(padding=(0, _INDENT, 0, 0))
                    grid.add_column(width=width, no_wrap=True)
                    grid.add_column(overflow="fold")
                    grid.add_row(_left(heading), _left(text))
                    yield Padding(grid, (0, 0, 0, _INDENT))
                else:
                    yield from _folded(heading, _INDENT)
                    yield from _folded(text, 2 * _INDENT)
        yield Text()

    def _title(self, console: Console, first: RenderableType) -> Text:
        """The first line of a block; a number has its heading, as it would mean nothing without."""
        heading, text = _text(console, self.columns[0].header), _text(console, first)
        is_name = not text.plain[:1].isdecimal()
        return text if is_name or not heading.plain.strip() else Text.assemble(heading.plain, ": ", text)


def _shared_out(needed: Sequence[int], wanted: Sequence[int], free: int) -> list[int]:
    """Widths of the columns: what they need, and the free columns one by one where more is wanted."""
    widths = list(needed)
    while free > 0 and any(width < most for width, most in zip(widths, wanted, strict=True)):
        # the narrowest that wants more, so that long cells share
        index = min((i for i in range(len(widths)) if widths[i] < wanted[i]), key=lambda i: widths[i])
        widths[index] += 1
        free -= 1
    return widths


def _text(console: Console, cell: RenderableType) -> Text:
    return cell if isinstance(cell, Text) else console.render_str(str(cell))


def _left(text: Text) -> Text:
    copied = text.copy()
    copied.justify, copied.overflow, copied.no_wrap = "left", "fold", False
    return copied


def _folded(text: Text, indent: int) -> Iterator[RenderableType]:
    yield Padding(_left(text), (0, 0, 0, indent))


def listing_table(
    *headings: str,
    right: Sequence[str] = (),
    folded: Sequence[str] = (),
    rows: Iterable[Sequence["str | Text"]] = (),
) -> "Table":
    """A table without vertical lines.

    Args:
        headings: one per column.
        right: headings of right-aligned columns.
        folded: headings of columns whose cells may wrap.
        rows: cells to print verbatim, not as rich markup; an empty row is a rule.
    """
    from rich.text import Text

    table = WholeTable()
    for heading in headings:
        # a Text is printed verbatim; names of models and plug-ins may look like rich markup
        text = Text(heading, justify="right" if heading in right else "left")
        table.add_column(text, justify=text.justify or "left", no_wrap=heading not in folded, overflow="fold")
    for row in rows:
        if row:
            add_listing_row(table, *row)
        else:
            table.add_section()
    return table


def add_listing_row(table: "Table", *cells: "str | Text") -> None:
    """Add a row whose strings are printed verbatim, not as rich markup."""
    from rich.text import Text

    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))


PLAIN_WIDTH = 100
_HEADING_WIDTH = 21
_NO_FIGURE = "n/a"
_SMALLEST_PERCENT, _LARGEST_PERCENT = 0.005, 999


@dataclass(frozen=True, kw_only=True, slots=True)
class FiguresColumn:
    """One column of the tables of roles and phases.

    Attributes:
        title: origin of the figures, such as `measured` or `estimated`.
        roles: bytes by role at the peak.
        phases: peak allocated bytes of each phase; a missing phase prints as n/a.
        peak_bytes: None if unknown.
        comparable: whether differences from other columns make sense; not if memory ran out.
    """

    title: str
    roles: MemoryBreakdown
    phases: Mapping[Phase, int] = field(default_factory=dict)
    peak_bytes: int | None = None
    comparable: bool = True


def console(file: IO[str] | None = None) -> "Console":
    """The console for results, on stdout by default; COLUMNS wide, or 100, if that is not a terminal.

    It prints text literally: it ignores markup in brackets and escapes control characters.
    """
    target = file if file is not None else sys.stdout
    width = None if target.isatty() or "COLUMNS" in os.environ else PLAIN_WIDTH
    return PlainConsole(file=target, width=width)


def roles_table(columns: Sequence[FiguresColumn], *, reference: int | None = None, distance: str = "error") -> "Table":
    """Tabulate bytes by role in MiB; roles that print as zero in every column are omitted.

    Next to a single column are shares of the total. With several columns, each except the reference
    has its difference from the reference in percent.

    Args:
        columns: at least one.
        reference: index of the column that the others are compared with; None is the first.
        distance: heading of the differences.
    """
    rows: list[tuple[str, list[int | None]]] = [
        (role.value, [column.roles[role] for column in columns])
        for role in Role
        if not all(prints_as_zero(column.roles[role]) for column in columns)
    ]
    rows.append(("total", [column.roles.total_bytes for column in columns]))
    return _figures_table("role", columns, rows, reference, distance)


def phases_table(columns: Sequence[FiguresColumn], *, reference: int | None = None, distance: str = "error") -> "Table":
    """Tabulate the peak of each phase and of the step in MiB, with differences as in `roles_table`."""
    phases = shown_phases(*(column.phases for column in columns))
    rows = [(phase.value, [column.phases.get(phase) for column in columns]) for phase in phases]
    rows.append(("peak", [column.peak_bytes for column in columns]))
    return _figures_table("phase", columns, rows, reference, distance)


def groups_table(
    heading: str,
    *figures: str,
    figure_width: int,
    heading_width: int = _HEADING_WIDTH,
    who: str | None = None,
) -> "Table":
    """An empty table of block groups: a heading, figures, and optionally a column of call sites."""
    table = WholeTable()
    table.add_column(heading, no_wrap=True, min_width=heading_width)
    for figure in figures:
        table.add_column(figure, justify="right", no_wrap=True, min_width=figure_width)
    if who is not None:
        table.add_column(who, overflow="fold")
    return table


def file_text(text: str) -> "Text":
    """Text from a file for a table: neither markup nor control characters have an effect."""
    from rich.text import Text

    return Text(printable(text, keep="\n"))


def percent_error(size_bytes: int | None, reference_bytes: int | None) -> str:
    """Format the relative error of a figure, such as `+0.42 %`.

    `n/a` if either is missing or the reference is 0; empty if both print as 0.0 MiB, where an error
    would be noise; `> 999 %` beyond that.
    """
    if size_bytes is None or reference_bytes is None:
        return _NO_FIGURE
    if size_bytes == reference_bytes:
        return "0.00 %"
    if prints_as_zero(size_bytes) and prints_as_zero(reference_bytes):
        return ""
    if reference_bytes == 0:
        return _NO_FIGURE
    percent = 100 * (size_bytes / reference_bytes - 1)
    if abs(percent) < _SMALLEST_PERCENT:
        return "0.00 %"
    return f"{percent:+.2f} %" if abs(percent) < _LARGEST_PERCENT else f"> {_LARGEST_PERCENT} %"


def percent_share(size_bytes: int | None, total_bytes: int | None) -> str:
    """Format a share, such as `35.0 %`; `n/a` if it is unknown or the total is 0."""
    return f"{100 * size_bytes / total_bytes:.1f} %" if size_bytes is not None and total_bytes else _NO_FIGURE


def _figures_table(
    heading: str,
    columns: Sequence[FiguresColumn],
    rows: Sequence[tuple[str, Sequence[int | None]]],
    reference: int | None,
    distance: str,
) -> "Table":
    """Lay out rows of bytes; the last row is the total, below a rule."""
    against = None if len(columns) == 1 else reference or 0
    differing = [
        against is not None and index != against and column.comparable and columns[against].comparable
        for index, column in enumerate(columns)
    ]
    table = WholeTable()
    table.add_column(heading, no_wrap=True)
    for column, differs in zip(columns, differing, strict=True):
        table.add_column(f"{column.title}, MiB", justify="right", overflow="fold")
        if differs or against is None:
            table.add_column("share" if against is None else distance, justify="right", no_wrap=True)
    totals = rows[-1][1]
    for number, (name, figures) in enumerate(rows, 1):
        cells = []
        for size_bytes, differs in zip(figures, differing, strict=True):
            cells.append(_NO_FIGURE if size_bytes is None else format_mib(size_bytes))
            if against is None:
                cells.append(percent_share(size_bytes, totals[0]))
            elif differs:
                cells.append(percent_error(size_bytes, figures[against]))
        table.add_row(name, *cells, end_section=number == len(rows) - 1)
    return table


_CONTINUED = " \\"


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """A command after an indent or a word, continued with backslashes between options where it is too wide."""

    text: str

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        """Lines that rich does not wrap; a single option that is too wide is left to the terminal."""
        from rich.text import Text

        yield Text(wrap_command(self.text, options.max_width), no_wrap=True, overflow="ignore")


def wrap_command(text: str, width: int) -> str:
    """Wrap a command of more than `width` columns between its options, with the shell's line continuation."""
    lines = [""]
    for part in re.split(r" (?=--)", text):
        if lines[-1] and len(lines[-1]) + 1 + len(part) + len(_CONTINUED) > width:
            lines[-1] += _CONTINUED
            lines.append(f"    {part}")
        else:
            lines[-1] += f" {part}" if lines[-1] else part
    return "\n".join(lines)
