"""Memory over one training step, stacked by role; several recordings share one axis."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ligerprof.analyzers.explain.timeline import RoleTimeline
from ligerprof.reports.figures.roles import Piece, pieces_of
from ligerprof.reports.figures.style import FAILURE, HALF_PAGE_INCHES, INK, RULE, drawing, shortened
from ligerprof.roles import STEP_PHASES, MemoryBreakdown, Phase
from ligerprof.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

_AXES_INCHES = 2.1
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
        columns: indices into the timeline's columns.
        places: GiB allocated and freed from the start of the step to each column, and to the end of the last.
        phases: (phase, start, end) in order.
        failed: whether an allocation fails at the end.
    """

    title: str
    timeline: RoleTimeline
    columns: "NDArray[np.int64]"
    places: tuple[float, ...]
    phases: tuple[tuple[Phase, float, float], ...]
    failed: bool

    def breakdowns(self) -> list[MemoryBreakdown]:
        """Bytes by role in each column."""
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
    with drawing(_AXES_INCHES * rows, *sentences) as figure:
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
