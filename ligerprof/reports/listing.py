"""The plain table of terminal reports."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


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

    from ligerprof.reports.whole_table import WholeTable

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
