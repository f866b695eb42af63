"""Render `ligerprof compare`: peak, phases and roles of each source, with differences from one of them."""

from pathlib import Path
from typing import TYPE_CHECKING

from ligerprof.analyzers.compare import Comparison
from ligerprof.reports.terminal import FiguresColumn, phases_table, roles_table

if TYPE_CHECKING:
    from rich.console import RenderableType


def render_comparison(comparison: Comparison) -> "RenderableType":
    """Lay out a comparison; one line per source names its column."""
    from rich.console import Group
    from rich.text import Text

    titles = column_titles(comparison)
    columns = [
        FiguresColumn(title=title, roles=item.roles, phases=item.phases, peak_bytes=item.peak_bytes)
        for title, item in zip(titles, comparison.columns, strict=True)
    ]
    distance = "error" if comparison.is_of_one_step else "difference"
    return Group(
        *(Text(f"{title}: {item.source}") for title, item in zip(titles, comparison.columns, strict=True)),
        Text(f"{distance}: against {titles[comparison.reference]}"),
        phases_table(columns, reference=comparison.reference, distance=distance),
        roles_table(columns, reference=comparison.reference, distance=distance),
    )


def column_titles(comparison: Comparison) -> list[str]:
    """A short name for each column: its backend, with the source's name or number if backends repeat."""
    backends = [column.backend for column in comparison.columns]
    if len(set(backends)) == len(backends):
        return list(backends)
    names = [f"{Path(column.file).name.partition('.')[0]} {column.backend}" for column in comparison.columns]
    if len(set(names)) == len(names):
        return names
    return [f"{index} {column.backend}" for index, column in enumerate(comparison.columns, 1)]
