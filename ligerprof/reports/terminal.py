"""Terminal tables of roles and phases, plain lists, and commands to copy; rich is imported when one is printed."""

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Literal

from ligerprof.roles import MemoryBreakdown, Phase, Role, shown_phases
from ligerprof.units import format_mib, prints_as_zero

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table
    from rich.text import Text


def listing_table(
    *headings: str, right: Sequence[str] = (), folded: Sequence[str] = (), rows: Iterable[Sequence["str | Text"]] = ()
) -> "Table":
    """A table without vertical lines.

    Args:
        right: headings of right-aligned columns.
        folded: headings of columns whose cells may wrap.
        rows: an empty row is a rule.
    """
    from ligerprof.reports.console import WholeTable

    table = WholeTable()
    for heading in headings:
        justify: Literal["left", "right"] = "right" if heading in right else "left"
        table.add_column(heading, justify=justify, no_wrap=heading not in folded, overflow="fold")
    for row in rows:
        if row:
            table.add_row(*row)
        else:
            table.add_section()
    return table


PLAIN_WIDTH = 100
_HEADING_WIDTH = 21
NO_FIGURE = "n/a"
# of the total, below which the error of a row is not printed
_NOISE_SHARE = 0.01
_SMALLEST_PERCENT, _LARGEST_PERCENT = 0.005, 999


@dataclass(frozen=True, kw_only=True, slots=True)
class FiguresColumn:
    """One column of the tables of roles and phases.

    Attributes:
        title: origin of the figures, such as `measured` or `estimated`.
        phases: peak allocated bytes of each phase; a missing phase prints as n/a.
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
    from ligerprof.reports.console import PlainConsole

    target = file if file is not None else sys.stdout
    width = None if target.isatty() or "COLUMNS" in os.environ else PLAIN_WIDTH
    return PlainConsole(file=target, width=width)


def roles_table(columns: Sequence[FiguresColumn], *, reference: int | None = None, distance: str = "error") -> "Table":
    """Tabulate bytes by role in MiB; roles that print as zero in every column are omitted.

    Next to a single column are shares of the total. With several columns, each except the reference
    has its difference from the reference in percent.

    Args:
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
    heading: str, *figures: str, figure_width: int, heading_width: int = _HEADING_WIDTH, who: str | None = None
) -> "Table":
    """An empty table of block groups: a heading, figures, and optionally a column of call sites."""
    from ligerprof.reports.console import WholeTable

    table = WholeTable()
    table.add_column(heading, no_wrap=True, min_width=heading_width)
    for figure in figures:
        table.add_column(figure, justify="right", no_wrap=True, min_width=figure_width)
    if who is not None:
        table.add_column(who, overflow="fold")
    return table


def stacked(*parts: "RenderableType") -> "RenderableType":
    """The parts, one below the other; strings are printed verbatim."""
    from rich.console import Group
    from rich.text import Text

    return Group(*(Text(part) if isinstance(part, str) else part for part in parts))


def bold(text: str) -> "Text":
    """A heading, printed verbatim."""
    from rich.text import Text

    return Text(text, style="bold")


def percent_error(size_bytes: int | None, reference_bytes: int | None, *, least_bytes: int = 0) -> str:
    """Format the relative error of a figure, such as `+0.42 %`.

    `n/a` if either is missing or the reference is 0; empty if both are below `least_bytes` or print as 0.0 MiB, where
    an error would be noise; `> 999 %` beyond that.
    """
    if size_bytes is None or reference_bytes is None:
        return NO_FIGURE
    if size_bytes == reference_bytes:
        return "0.00 %"
    largest_bytes = max(size_bytes, reference_bytes)
    if prints_as_zero(largest_bytes) or largest_bytes < least_bytes:
        return ""
    if reference_bytes == 0:
        return NO_FIGURE
    percent = 100 * (size_bytes / reference_bytes - 1)
    if abs(percent) < _SMALLEST_PERCENT:
        return "0.00 %"
    return f"{percent:+.2f} %" if abs(percent) < _LARGEST_PERCENT else f"> {_LARGEST_PERCENT} %"


def percent_share(part: float | None, total: float | None) -> str:
    """Format a share, such as `35.0 %`; `n/a` if it is unknown or the total is 0."""
    return f"{100 * part / total:.1f} %" if part is not None and total else NO_FIGURE


def cut(text: str, width: int) -> str:
    """A text of at most so many characters, with an ellipsis if it is longer."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _figures_table(
    heading: str,
    columns: Sequence[FiguresColumn],
    rows: Sequence[tuple[str, Sequence[int | None]]],
    reference: int | None,
    distance: str,
) -> "Table":
    """Lay out rows of bytes; the last row is the total, below a rule."""
    from ligerprof.reports.console import WholeTable

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
            cells.append(NO_FIGURE if size_bytes is None else format_mib(size_bytes))
            if against is None:
                cells.append(percent_share(size_bytes, totals[0]))
            elif differs:
                whole = totals[against or 0] or 0
                cells.append(percent_error(size_bytes, figures[against or 0], least_bytes=int(_NOISE_SHARE * whole)))
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
