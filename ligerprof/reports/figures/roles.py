"""Roles at the peak as stacked bars; roles that are small in every bar are pooled."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ligerprof.recipe.categories import Axis
from ligerprof.reports.figures.series import Setting, split_series
from ligerprof.reports.figures.style import HALF_PAGE_INCHES, POOLED_LOOK, ROLE_LOOKS, AreaLook, drawing
from ligerprof.roles import MemoryBreakdown, Role
from ligerprof.runs.sweep.cells import CellStatus
from ligerprof.units import GIB, MIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# a role with a smaller share of every bar would not be visible
_SMALLEST_SHARE = 0.015
_BAR_INCHES = 0.21
_MOST_GROUPS = 3
# space to the right of the longest bar, for its sum
_ROOM = 1.16


@dataclass(frozen=True, kw_only=True, slots=True)
class RolesBar:
    """One bar.

    Attributes:
        title: shown next to the bar.
        group: adjacent bars of one group are drawn together, with the group's name next to the first.
    """

    title: str
    roles: MemoryBreakdown
    group: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One role, or the pooled roles: its size in each bar, in order."""

    label: str
    look: AreaLook
    sizes_bytes: tuple[int, ...]


def draw_roles(bars: Sequence[RolesBar], *sentences: str, width_inches: float = HALF_PAGE_INCHES) -> "Figure":
    """Draw one stacked bar for each of at least one, the first at the top, under a title of `sentences`."""
    places, place = [], 0.0
    for number, bar in enumerate(bars):
        # space between groups
        place += 1.0 if number == 0 or bar.group == bars[number - 1].group else 1.6
        places.append(place)
    height = 0.55 + _BAR_INCHES * (place + 0.5)
    columns = max(2, int(width_inches / 1.7))
    with drawing(height, *sentences, width_inches=width_inches, columns=columns) as figure:
        axes = figure.add_subplot()
        most_bytes = max(bar.roles.total_bytes for bar in bars)
        unit_bytes, unit = (GIB, "GiB") if most_bytes >= GIB // 10 else (MIB, "MiB")
        _stack(axes, bars, places, unit_bytes)
        # long names of bars leave less width than a centered label may need
        axes.set_xlabel(f"allocated at the peak, {unit}", loc="right")
    return figure


def find_bars(setting: Setting, axis: Axis) -> tuple[RolesBar, ...]:
    """Bars of the kernel sets that ran at up to three sizes, chosen from those at which `none` and most others ran."""
    series = split_series(setting, axis)
    found = {
        one.label: {getattr(cell.recipe, axis): cell for cell in one.cells if cell.status is CellStatus.DONE}
        for one in series
    }
    plain = [one.label for one in series if one.kernels == "none"] or list(found)
    # a set that ran at one size alone, as in an ablation, does not choose the sizes
    several = [cells for cells in found.values() if len(cells) > 1] or list(found.values())
    ran = Counter(size for cells in several for size in cells)
    counts = {size: ran[size] for label in plain for size in found[label]}
    sizes = sorted(size for size, count in counts.items() if count == max(counts.values()))
    chosen = sizes if len(sizes) <= _MOST_GROUPS else [sizes[0], sizes[len(sizes) // 2], sizes[-1]]
    labels = [label for label, cells in found.items() if all(size in cells for size in chosen)]
    return tuple(
        RolesBar(title=label, roles=figures.roles, group=f"{axis} {size}" if len(chosen) > 1 else "")
        for size in chosen
        for label in labels
        if (figures := found[label][size].figures) is not None
    )


def pieces_of(breakdowns: Sequence[MemoryBreakdown]) -> tuple[Piece, ...]:
    """The visible roles in the order of Role, then the others, pooled and counted."""
    totals = np.array([max(breakdown.total_bytes, 1) for breakdown in breakdowns])
    sizes = {role: np.array([breakdown[role] for breakdown in breakdowns]) for role in Role}
    shown = [role for role in Role if (sizes[role] / totals >= _SMALLEST_SHARE).any()]
    pooled = [role for role in Role if role not in shown and sizes[role].any()]
    pieces = [Piece(label=role.value, look=ROLE_LOOKS[role], sizes_bytes=tuple(sizes[role].tolist())) for role in shown]
    if pooled:
        others = sum((sizes[role] for role in pooled), start=np.zeros(len(breakdowns), dtype=np.int64))
        label = pooled[0].value if len(pooled) == 1 else f"{len(pooled)} more roles"
        pieces.append(Piece(label=label, look=POOLED_LOOK, sizes_bytes=tuple(others.tolist())))
    return tuple(pieces)


def _stack(axes: "Axes", bars: Sequence[RolesBar], places: Sequence[float], unit_bytes: int) -> None:
    left = np.zeros(len(bars))
    for piece in pieces_of([bar.roles for bar in bars]):
        sizes = np.array(piece.sizes_bytes) / unit_bytes
        axes.barh(places, sizes, height=0.82, left=left, label=piece.label, **piece.look.arguments())
        left += sizes
    for place, total in zip(places, left, strict=True):
        axes.annotate(f"{total:.3g}", (total, place), textcoords="offset points", xytext=(3, 0), va="center")
    axes.set_xlim(0, _ROOM * left.max() or 1.0)
    axes.set_yticks(places, [_bar_title(bars, number) for number in range(len(bars))])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(places[-1] + 0.6, places[0] - 0.6)
    axes.grid(visible=False, axis="y")


def _bar_title(bars: Sequence[RolesBar], number: int) -> str:
    bar = bars[number]
    first = number == 0 or bars[number - 1].group != bar.group
    return f"{bar.group}, {bar.title}" if first and bar.group else bar.title
