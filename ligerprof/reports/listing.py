"""How lists look in a terminal: the plain tables of `models`, `kernels` and `env`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def listing_table(*headings: str, right: tuple[str, ...] = (), folded: tuple[str, ...] = ()) -> "Table":
    """An empty table.

    Args:
        headings: one a column.
        right: those of them whose cells are aligned to the right.
        folded: those of them whose cells may take several lines; the others never do.
    """
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        justify, fold = "right" if heading in right else "left", heading in folded
        table.add_column(heading, justify=justify, no_wrap=not fold, overflow="fold")  # type: ignore[arg-type]
    return table
