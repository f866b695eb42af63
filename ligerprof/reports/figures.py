"""Figures of memory: the one style they share, bars of roles, and bytes over the life of a recording."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ligerprof.reports.terminal import RolesColumn
from ligerprof.roles import Phase, Role
from ligerprof.snapshots.replay import Replay
from ligerprof.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE = Path(__file__).with_name("figures.mplstyle")

ROLE_COLORS: dict[Role, str] = {
    Role.PARAMETERS: "#1b4f72",
    Role.GRADIENTS: "#2e86c1",
    Role.OPTIMIZER_STATES: "#85c1e9",
    Role.OPTIMIZER_TEMPORARIES: "#d6eaf8",
    Role.WEIGHT_CASTS: "#117a65",
    Role.CHECKPOINTS: "#45b39d",
    Role.ACTIVATIONS: "#a9dfbf",
    Role.ATTENTION_TEMPORARIES: "#d4efdf",
    Role.LOGITS: "#922b21",
    Role.SHIFT_LOGITS: "#cd6155",
    Role.CE_TEMPORARIES: "#e6b0aa",
    Role.KERNEL_WORKSPACE: "#b9770e",
    Role.LIBRARY_WORKSPACE: "#f5b041",
    Role.COMMUNICATION: "#6c3483",
    Role.INPUTS: "#c39bd3",
    Role.ALLOCATOR_ROUNDING: "#797d7f",
    Role.OTHER: "#b2babb",
    Role.UNATTRIBUTED: "#2c3e50",
}
_PHASE_SHADES = {Phase.FORWARD: "#ffffff", Phase.BACKWARD: "#ececec", Phase.OPTIMIZER: "#dcdcdc"}
_MAX_POINTS = 2000
_SMALLEST_SHARE = 0.003


def draw_roles(columns: Sequence[RolesColumn]) -> "Figure":
    """One stacked bar a column: the peak by role, in GiB; roles under 0.3 % of every bar share one piece."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(fname=STYLE):
        figure = Figure(figsize=(8.0, 1.6 + 0.45 * len(columns)))
        axes = figure.add_subplot()
        _stack_bars(axes, columns)
        axes.set_xlabel("bytes at the peak, GiB")
        axes.grid(visible=False, axis="y")
        figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    return figure


def _stack_bars(axes: "Axes", columns: Sequence[RolesColumn]) -> None:
    titles = [column.title for column in columns]
    left = np.zeros(len(columns))
    rest = np.zeros(len(columns))
    totals = np.array([max(column.roles.total_bytes, 1) for column in columns])
    for role in Role:
        sizes = np.array([column.roles[role] for column in columns])
        if not (sizes / totals > _SMALLEST_SHARE).any():
            rest += sizes
            continue
        axes.barh(titles, sizes / GIB, left=left / GIB, color=ROLE_COLORS[role], label=role.value, edgecolor="white")
        left += sizes
    if rest.any():
        axes.barh(titles, rest / GIB, left=left / GIB, color="#f2f3f4", label="all else", edgecolor="#b2babb")
    axes.invert_yaxis()


def draw_timeline(replay: Replay) -> "Figure":
    """Allocated and reserved GiB over the events of a recording, phases shaded where stamps tell them."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(fname=STYLE):
        figure = Figure(figsize=(8.0, 3.2))
        axes = figure.add_subplot()
        _shade_phases(axes, replay)
        moments = _highest_moments(replay.allocated_bytes)
        allocated = replay.allocated_bytes[moments] / GIB
        axes.fill_between(moments, allocated, step="post", color="#2e86c1", alpha=0.55, linewidth=0)
        axes.step(moments, allocated, where="post", color="#1b4f72", linewidth=0.8, label="allocated")
        axes.step(moments, replay.reserved_bytes[moments] / GIB, where="post", color="#b9770e", label="reserved")
        peak = replay.peak_moment()
        axes.plot([peak], [replay.allocated_bytes[peak] / GIB], marker="v", color="#922b21", label="peak", linestyle="")
        axes.set_xlim(0, replay.last_moment)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("allocator events (white: forward, light: backward, grey: optimizer)")
        axes.set_ylabel("GiB")
        axes.legend(loc="upper left", ncols=3)
    return figure


def _highest_moments(allocated_bytes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """At most 2000 moments, each the highest of its stretch, so that no peak is lost."""
    count = len(allocated_bytes)
    if count <= _MAX_POINTS:
        return np.arange(count, dtype=np.int64)
    edges = np.linspace(0, count, _MAX_POINTS + 1).astype(np.int64)
    highest = [start + int(np.argmax(allocated_bytes[start:stop])) for start, stop in pairwise(edges)]
    return np.array(highest, dtype=np.int64)


def _shade_phases(axes: "Axes", replay: Replay) -> None:
    start, running = 0, None
    for event in range(replay.last_moment + 1):
        stamp = replay.stamp_of(event) if event < replay.last_moment else None
        phase = stamp.phase if stamp is not None else None
        if phase is running and event < replay.last_moment:
            continue
        if running is not None and running in _PHASE_SHADES and event > start:
            axes.axvspan(start, event, color=_PHASE_SHADES[running], zorder=0, linewidth=0)
        start, running = event, phase
