"""Render `ligerprof compare`: peak, phases and roles of each source, with differences from one of them."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ligerprof.analyzers.compare import Comparison, Figures
from ligerprof.reports.terminal import FiguresColumn, phases_table, roles_table
from ligerprof.units import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

_MOST_REMEDIES = 8

_SUFFIXES = re.compile(r"(\.(json|pickle|pkl|gz|xz))+$")


def render_comparison(comparison: Comparison) -> "RenderableType":
    """Lay out a comparison; one line per source names its column."""
    from rich.console import Group
    from rich.text import Text

    titles = column_titles(comparison)
    columns = [_column(title, item) for title, item in zip(titles, comparison.columns, strict=True)]
    distance = "error" if comparison.is_of_one_step else "difference"
    return Group(
        *(Text(f"{title}: {item.source}") for title, item in zip(titles, comparison.columns, strict=True)),
        *(Text(line) for line in _failure_lines(titles, comparison)),
        Text(f"{distance}: against {titles[comparison.reference]}"),
        phases_table(columns, reference=comparison.reference, distance=distance),
        roles_table(columns, reference=comparison.reference, distance=distance),
    )


def _column(title: str, item: Figures) -> FiguresColumn:
    """A column; if memory ran out, with the roles of that moment and without phases that were not reached."""
    if item.oom is None:
        return FiguresColumn(title=title, roles=item.roles, phases=item.phases, peak_bytes=item.peak_bytes)
    phases = {phase: size_bytes for phase, size_bytes in item.phases.items() if size_bytes}
    roles = item.oom.roles or item.roles
    return FiguresColumn(title=title, roles=roles, phases=phases, peak_bytes=item.peak_bytes, comparable=False)


def _failure_lines(titles: Sequence[str], comparison: Comparison) -> Iterator[str]:
    for title, item in zip(titles, comparison.columns, strict=True):
        if (oom := item.oom) is not None:
            phase = f" in {oom.phase.value}" if oom.phase else ""
            step = f" of step {oom.step}" if oom.step is not None else ""
            sizes = ((oom.requested_bytes, "requested"), (oom.allocated_bytes, "allocated"))
            figures = ", ".join(f"{format_bytes(size)} {word}" for size, word in sizes if size is not None)
            yield f"{title}: out of memory{phase}{step}{f': {figures}' if figures else ''}."
            if item.remedies:
                remedies = ", ".join(item.remedies[:_MOST_REMEDIES])
                yield f"{title}: each of these alone would have let it pass: {remedies}. `ligerprof explain` shows how."
    if any(item.oom is not None for item in comparison.columns):
        yield "Where memory ran out, the roles are those of that moment, and the phases what was reached."


def column_titles(comparison: Comparison) -> list[str]:
    """A short name for each column: its rank, or its backend, with the source's name or number if backends repeat."""
    if all(column.rank is not None for column in comparison.columns):
        return [f"rank {column.rank}" for column in comparison.columns]
    backends = [column.backend for column in comparison.columns]
    if len(set(backends)) == len(backends):
        return list(backends)
    names = [f"{_SUFFIXES.sub('', Path(column.file).name)} {column.backend}" for column in comparison.columns]
    if len(set(names)) == len(names):
        return names
    return [f"{index} {column.backend}" for index, column in enumerate(comparison.columns, 1)]
