"""Figures of memory by role: over a step, at peaks as bars, and by decoder layer."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ligerprof.analyzers.explain.peak import PeakReport
from ligerprof.analyzers.explain.timeline import RoleTimeline
from ligerprof.recipe.categories import Axis
from ligerprof.reports.figures.curves import FigureSetting, split_series
from ligerprof.reports.figures.style import (
    FAILURE,
    HALF_PAGE_INCHES,
    INK,
    POOLED_LOOK,
    ROLE_LOOKS,
    RULE,
    AreaLook,
    drawing,
    shortened,
)
from ligerprof.roles import STEP_PHASES, MemoryBreakdown, Phase, Role
from ligerprof.runs.sweep.cells import CellStatus
from ligerprof.units import GIB, MIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray


# a role with a smaller share of every bar would not be visible
_SMALLEST_SHARE = 0.015
_BAR_INCHES = 0.21
_MOST_GROUPS = 3
# space to the right of the longest bar, for its sum
_ROOM = 1.16


class RolesBar(NamedTuple):
    """One bar; `group`: adjacent bars of one group are drawn together, with the group's name next to the first."""

    title: str
    roles: MemoryBreakdown
    group: str = ""


class Piece(NamedTuple):
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


def find_bars(setting: FigureSetting, axis: Axis) -> tuple[RolesBar, ...]:
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


_AXES_INCHES = 2.0
_WIDTHS = (1, 3)


def layer_breakdowns(report: PeakReport) -> dict[int, MemoryBreakdown]:
    """Bytes by role of each decoder layer, in order; memory outside the layers is left out."""
    sizes: dict[int, dict[Role, int]] = {}
    for block in report.blocks:
        if block.layer is not None:
            roles = sizes.setdefault(block.layer, {})
            roles[block.role] = roles.get(block.role, 0) + block.size_bytes
    return {layer: MemoryBreakdown(roles=sizes[layer]) for layer in sorted(sizes)}


def draw_layers(report: PeakReport, *sentences: str) -> "Figure":
    """One stacked bar per layer in MiB, next to two bars of the whole peak in GiB; the report must have layers."""
    from matplotlib.ticker import MaxNLocator

    layers = layer_breakdowns(report)
    inside = {role: sum(breakdown[role] for breakdown in layers.values()) for role in Role}
    whole = [
        MemoryBreakdown(roles=inside),
        MemoryBreakdown(roles={role: report.roles[role] - inside[role] for role in Role}),
    ]
    breakdowns = [*whole, *layers.values()]
    with drawing(_AXES_INCHES, *sentences) as figure:
        of_peak, of_layers = figure.subplots(1, 2, width_ratios=_WIDTHS)
        for axes, unit, places, columns in (
            (of_peak, GIB, np.arange(2), slice(0, 2)),
            (of_layers, MIB, np.array(list(layers)), slice(2, None)),
        ):
            bottom = np.zeros(len(places))
            for piece in pieces_of(breakdowns):
                sizes = np.array(piece.sizes_bytes[columns]) / unit
                axes.bar(places, sizes, width=0.8, bottom=bottom, label=piece.label, **piece.look.arguments())
                bottom += sizes
            axes.set_xlim(places[0] - 0.7, places[-1] + 0.7)
            axes.grid(visible=False, axis="x")
        of_peak.set_xticks([0, 1], ["in layers", "outside"], rotation=90)
        of_peak.set_ylabel("allocated at the peak, GiB")
        of_layers.set_xlabel("decoder layer")
        of_layers.set_ylabel("MiB")
        of_layers.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


_TIMELINE_INCHES = 2.1
_MARGIN_INCHES = 0.6
# as fine as half a page shows, and few enough for a small file
_MOST_COLUMNS = 250
_LETTER_INCHES = 0.068
_SHORT_NAMES = {Phase.FORWARD: "fwd", Phase.BACKWARD: "bwd", Phase.OPTIMIZER: "opt"}
_PASSES = (Phase.FORWARD, Phase.BACKWARD)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """The columns of one step to draw; the axis advances with the bytes that move, so that large blocks are wide.

    Attributes:
        places: GiB allocated and freed from the start of the step to each column, and to the end of the last.
    """

    title: str
    timeline: RoleTimeline
    columns: "NDArray[np.int64]"
    places: tuple[float, ...]
    phases: tuple[tuple[Phase, float, float], ...]
    failed: bool

    def breakdowns(self) -> list[MemoryBreakdown]:
        return [
            MemoryBreakdown(roles={role: int(sizes[column]) for role, sizes in self.timeline.roles.items()})
            for column in self.columns.tolist()
        ]


class Recorded(NamedTuple):
    """A recording to draw; `failed` is the moment of its last failed allocation, which requested so many bytes."""

    title: str
    timeline: RoleTimeline
    failed: int | None = None
    requested_bytes: int = 0

    @property
    def span(self) -> tuple[int, int] | None:
        """First column and end of what is drawn: the steps up to the failure, else the last whole step."""
        if self.failed is None:
            return last_step(self.timeline)
        end = int(np.searchsorted(self.timeline.starts, self.failed, "right"))
        begins = [begin for begin in _begins(self.timeline) if begin < end]
        return ([*begins[-2:], 0][0], end)


def draw_memory(recordings: Sequence[Recorded], *sentences: str) -> "Figure":
    """The span of each recording, two panels per row; each recording must have one."""
    steps = [_cut(recording) for recording in recordings]
    columns = min(len(steps), 2)
    rows = -(-len(steps) // columns)
    with drawing(_TIMELINE_INCHES * rows, *sentences) as figure:
        panels = figure.subplots(rows, columns, sharey=True, squeeze=False)
        pieces = pieces_of([breakdown for step in steps for breakdown in step.breakdowns()])
        width = (HALF_PAGE_INCHES - _MARGIN_INCHES) / columns
        start = 0
        for axes, step in zip(panels.flat, steps, strict=False):
            _draw_step(axes, step, pieces, start, width)
            _mark_phases(axes, step, width)
            start += len(step.columns)
        for axes in panels.flat[len(steps) :]:
            axes.set_axis_off()
        for axes in panels[:, 0]:
            axes.set_ylabel("GiB")
    return figure


def _cut(recording: Recorded) -> _Step:
    """The columns of a span, with one column, the highest, per pixel."""
    timeline = recording.timeline
    first, end = recording.span or (0, len(timeline.starts))
    moved = timeline.moved_bytes[first : end + 1] - timeline.moved_bytes[first]
    # what was held at the failure is as wide as the request
    moved[-1] += recording.requested_bytes
    pixels = moved[:-1] * _MOST_COLUMNS // max(int(moved[-1]), 1)
    edges = np.flatnonzero(np.append(True, np.diff(pixels) > 0)).tolist()
    highest = [
        first + low + int(np.argmax(timeline.allocated_bytes[first + low : first + high]))
        for low, high in pairwise([*edges, len(pixels)])
    ]
    return _Step(
        title=recording.title,
        timeline=timeline,
        failed=recording.failed is not None,
        columns=np.array(highest, dtype=np.int64),
        places=tuple((moved[[*edges, len(pixels)]] / GIB).tolist()),
        phases=tuple(_phases(timeline, first, end)),
    )


def last_step(timeline: RoleTimeline) -> tuple[int, int] | None:
    """First column and end of the last step with a forward and a backward pass, including the optimizer."""
    phases, begins = timeline.phases(), set(_begins(timeline))
    found = None
    for start in sorted(begins):
        end = start + 1
        while end < len(phases) and phases[end] in STEP_PHASES and end not in begins:
            end += 1
        if Phase.BACKWARD in phases[start:end]:
            found = start, end
    return found


def _begins(timeline: RoleTimeline) -> list[int]:
    """Where steps start: with a forward pass that follows neither a forward nor a backward pass."""
    pairs = pairwise([None, *timeline.phases()])
    return [column for column, (before, phase) in enumerate(pairs) if phase is Phase.FORWARD and before not in _PASSES]


def _phases(timeline: RoleTimeline, first: int, end: int) -> Iterator[tuple[Phase, float, float]]:
    moved = (timeline.moved_bytes - timeline.moved_bytes[first]) / GIB
    place = first
    for phase, members in groupby(timeline.phases()[first:end]):
        stop = place + len(list(members))
        if phase is not None:
            yield phase, float(moved[place]), float(moved[stop])
        place = stop


def _draw_step(axes: "Axes", step: _Step, pieces: Sequence[Piece], start: int, width_inches: float) -> None:
    below = np.zeros(len(step.columns) + 1)
    for piece in pieces:
        own = np.array(piece.sizes_bytes[start : start + len(step.columns)]) / GIB
        above = below + _held(own)
        look = {**piece.look.arguments(), "linewidth": 0}
        # empty columns are not drawn; a column includes its right edge
        shown = _held(own > 0) | np.append(False, own > 0)
        axes.fill_between(step.places, below, above, where=shown, step="post", label=piece.label, **look)
        below = above
    reserved = _held(step.timeline.reserved_bytes[step.columns] / GIB)
    line: dict[str, Any] = {"color": INK, "linewidth": 0.8, "linestyle": (0, (4, 1.5))}
    axes.step(step.places, reserved, where="post", label="reserved", **line)
    axes.set_xlim(0, step.places[-1])
    if step.failed:
        axes.axvline(step.places[-1], color=FAILURE, linewidth=2.5, label="out of memory", clip_on=False)
    axes.set_xlabel("allocated and freed, GiB")
    axes.locator_params(axis="x", nbins=4)
    axes.set_title(shortened(step.title, width_inches))


def _held(values: "NDArray[Any]") -> "NDArray[Any]":
    """Repeat the last value, for the end of the last column."""
    return np.append(values, values[-1])


def _mark_phases(axes: "Axes", step: _Step, width_inches: float) -> None:
    """Draw the bounds of the phases, and the names that fit."""
    axes.set_ylim(0, 1.14 * axes.get_ylim()[1])
    above = axes.get_xaxis_transform()
    for phase, first, end in step.phases:
        axes.axvline(end, color=RULE, linewidth=0.6, linestyle=(0, (2, 2)))
        room = (end - first) / step.places[-1] * width_inches
        words = (phase.value, _SHORT_NAMES.get(phase, ""))
        fitting = next((word for word in words if room > _LETTER_INCHES * (len(word) + 1)), "")
        axes.text((first + end) / 2, 0.985, fitting, ha="center", va="top", transform=above)
