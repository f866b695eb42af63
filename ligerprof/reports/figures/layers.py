"""The memory at the peak by decoder layer, stacked by role."""

from typing import TYPE_CHECKING

import numpy as np

from ligerprof.analyzers.explain.peak import PeakReport
from ligerprof.reports.figures.roles import pieces_of
from ligerprof.reports.figures.style import drawing
from ligerprof.roles import MemoryBreakdown, Role
from ligerprof.units import GIB, MIB

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
