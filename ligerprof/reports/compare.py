"""Render `ligerprof compare`: peak, phases and roles of every source, with differences from one of them."""

from pathlib import Path
from typing import TYPE_CHECKING

from ligerprof.analyzers.compare import Comparison
from ligerprof.analyzers.result_reader import Figures
from ligerprof.reports.terminal import PhasesColumn, RolesColumn, phases_table, roles_table

if TYPE_CHECKING:
    from rich.console import RenderableType


def render_comparison(comparison: Comparison) -> "RenderableType":
    """Lay out a comparison; one line per source names its column."""
    from rich.console import Group
    from rich.text import Text

    titles = column_titles(comparison)
    columns = tuple(zip(titles, comparison.columns, strict=True))
    phases = [PhasesColumn(title=title, phases=item.phases, peak_bytes=item.peak_bytes) for title, item in columns]
    roles = [RolesColumn(title=title, roles=item.roles) for title, item in columns]
    distance = "error" if comparison.is_of_one_step else "difference"
    return Group(
        *(Text(f"{title}: {item.source}") for title, item in columns),
        Text(f"{distance}: against {titles[comparison.reference]}"),
        phases_table(phases, reference=comparison.reference, distance=distance),
        roles_table(roles, reference=comparison.reference, distance=distance),
    )


def column_titles(comparison: Comparison) -> list[str]:
    """A short name for each column: its backend, with the source's name or number if backends repeat."""
    backends = [column.backend for column in comparison.columns]
    if len(set(backends)) == len(backends):
        return list(backends)
    names = [f"{_short_name(column)} {column.backend}" for column in comparison.columns]
    if len(set(names)) == len(names):
        return names
    return [f"{index} {column.backend}" for index, column in enumerate(comparison.columns, 1)]


def _short_name(column: Figures) -> str:
    return Path(column.file).name.partition(".")[0]
