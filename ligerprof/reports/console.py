"""A rich console and table for text that comes from files: no markup, no control characters, no cut value."""

import os
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from typing import IO, Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from ligerprof.text import printable
from ligerprof.units import unbroken

# one column wide, replaces a blank at which no line breaks
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
        return super().render_str(printable(text, keep="\n"), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        if isinstance(renderable, Text) and (plain := printable(renderable.plain, keep="\n")) != renderable.plain:
            # the styles of parts are lost, since their places change
            escaped = Text(plain, style=renderable.style, justify=renderable.justify, overflow=renderable.overflow)
            escaped.no_wrap = renderable.no_wrap
            renderable = escaped
        if not isinstance(renderable, Text) or (options or self.options).max_width < _LEAST_WIDTH:
            return super().render(renderable, options)
        kept = renderable.copy()
        kept.plain = unbroken(kept.plain, _NO_BREAK)
        rendered = super().render(kept, options)
        return (segment._replace(text=segment.text.replace(_NO_BREAK, " ")) for segment in rendered)


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
        unbounded = options.update(max_width=_UNBOUNDED, width=_UNBOUNDED)
        found = [table._measure_column(console, unbounded, column) for column in table.columns]
        needed = [
            each.maximum if column.no_wrap else min(each.minimum, _LONGEST_WORD + table._get_padding_width(index))
            for index, (column, each) in enumerate(zip(table.columns, found, strict=True))
        ]
        return table, needed, [each.maximum for each in found]

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
