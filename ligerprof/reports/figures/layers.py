"""The memory at the peak by decoder layer, stacked by role."""

from typing import TYPE_CHECKING

import numpy as np

from ligerprof.analyzers.explain.peak import PeakReport
from ligerprof.reports.figures.roles import pieces_of
from ligerprof.reports.figures.style import drawing
from ligerprof.roles import MemoryBreakdown, Role
from ligerprof.units import MIB

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_AXES_INCHES = 2.0


def layer_breakdowns(report: PeakReport) -> dict[int, MemoryBreakdown]:
    """Bytes by role of each decoder layer, in order; memory outside the layers is left out."""
    sizes: dict[int, dict[Role, int]] = {}
    for block in report.blocks:
        if block.layer is not None:
            roles = sizes.setdefault(block.layer, {})
            roles[block.role] = roles.get(block.role, 0) + block.size_bytes
    return {layer: MemoryBreakdown(roles=sizes[layer]) for layer in sorted(sizes)}


def draw_layers(report: PeakReport, *sentences: str) -> "Figure":
    """One stacked bar per layer, in MiB; the report must have layers."""
    from matplotlib.ticker import MaxNLocator

    breakdowns = layer_breakdowns(report)
    outside_bytes = report.peak_bytes - sum(breakdown.total_bytes for breakdown in breakdowns.values())
    with drawing(_AXES_INCHES, *sentences, f"Outside the layers: {outside_bytes / MIB:,.0f} MiB") as figure:
        axes = figure.add_subplot()
        places = np.array(list(breakdowns))
        bottom = np.zeros(len(places))
        for piece in pieces_of(list(breakdowns.values())):
            sizes = np.array(piece.sizes_bytes) / MIB
            axes.bar(places, sizes, width=0.8, bottom=bottom, label=piece.label, **piece.look.arguments())
            bottom += sizes
        axes.set_xlabel("decoder layer")
        axes.set_ylabel("allocated at the peak, MiB")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlim(places[0] - 0.7, places[-1] + 0.7)
        axes.grid(visible=False, axis="x")
    return figure
