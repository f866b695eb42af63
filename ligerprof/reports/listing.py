"""Terminal tables of `models`, `kernels` and `env`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


def listing_table(*headings: str, right: tuple[str, ...] = (), folded: tuple[str, ...] = ()) -> "Table":
    """An empty table.

    Args:
        headings: one per column.
        right: headings of right-aligned columns.
        folded: headings of columns whose cells may wrap.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        # a Text is printed verbatim: names of models and plug-ins may look like rich markup
        text = Text(heading, justify="right" if heading in right else "left")
        table.add_column(text, justify=text.justify or "left", no_wrap=heading not in folded, overflow="fold")
    return table


def add_listing_row(table: "Table", *cells: "str | Text") -> None:
    """Add a row whose strings are printed verbatim, not as rich markup."""
    from rich.text import Text

    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))
