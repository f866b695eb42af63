"""Figures of memory: the one style and colours they share, and bars of roles."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ligerprof.reports.terminal import RolesColumn
from ligerprof.roles import Role
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
