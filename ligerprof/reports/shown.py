"""Results of the library as their command prints them, for `print` and for notebooks."""

import io
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ligerprof.analyzers.compare import Comparison
from ligerprof.analyzers.estimate import MemoryEstimate
from ligerprof.analyzers.explain.analysis import explain
from ligerprof.analyzers.explain.peak import PeakDiff, PeakReport
from ligerprof.analyzers.search.changes import Advice
from ligerprof.analyzers.search.fastest import Fastest, Plan
from ligerprof.analyzers.search.fit import Fit
from ligerprof.analyzers.trace.analysis import TraceReport
from ligerprof.recipe.flags import command_line
from ligerprof.reports.console import PlainConsole
from ligerprof.reports.diff import render_comparison, render_diff
from ligerprof.reports.estimate import render_estimate
from ligerprof.reports.peak import render_peak
from ligerprof.reports.search import render_advice, render_fastest, render_fit, render_plan
from ligerprof.reports.terminal import PLAIN_WIDTH, FiguresColumn, console, roles_table, stacked
from ligerprof.reports.trace import render_trace
from ligerprof.roles import MemoryBreakdown
from ligerprof.runs.outcome import StepOutcome
from ligerprof.snapshots.reader import Snapshot
from ligerprof.units import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType


def _render_outcome(outcome: StepOutcome) -> "RenderableType":
    """The step's figures; the roles as well if its events were recorded."""
    failed = outcome.oom is not None
    reserved = f"{format_bytes(outcome.reserved_bytes)} reserved"
    what = "Memory ran out at" if failed else "The peak is"
    lines = [f"{what} {format_bytes(outcome.peak_bytes)}, {reserved} ({outcome.backend}, {outcome.gpu})."]
    if not outcome.snapshot:
        return stacked(*lines, *(f"{phase}: {format_bytes(size)}" for phase, size in outcome.phases.items()))
    snapshot = Snapshot.from_dict(outcome.snapshot, source="the step")
    return stacked(*lines, render_peak(explain(snapshot, step=None if failed else outcome.profiled_step)))


_TOP = 10
_RENDER: "Mapping[type, Callable[[Any], RenderableType]]" = {
    Advice: lambda advice: render_advice(advice, command_line("step", advice.plan)),
    Comparison: render_comparison,
    Fastest: render_fastest,
    Fit: render_fit,
    MemoryBreakdown: lambda roles: roles_table([FiguresColumn(title="size", roles=roles)]),
    MemoryEstimate: lambda estimate: render_estimate(estimate.recipe, estimate),
    PeakDiff: render_diff,
    PeakReport: render_peak,
    Plan: render_plan,
    StepOutcome: _render_outcome,
    TraceReport: lambda report: render_trace(report, top=_TOP),
}
# no background of its own: a notebook may be dark
_HTML = '<pre style="white-space:pre;overflow-x:auto;line-height:1.25;font-family:monospace">{code}</pre>'


def _rendered(result: Any) -> "RenderableType":
    return next(_RENDER[kind] for kind in type(result).__mro__ if kind in _RENDER)(result)


def as_text(result: Any) -> str:
    """The text that the result's command prints, 100 columns wide."""
    written = io.StringIO()
    console(written).print(_rendered(result))
    return written.getvalue().rstrip("\n")


def as_html(result: Any) -> str:
    """The same as an HTML element, escaped, with the styles of a terminal."""
    recorder = PlainConsole(file=io.StringIO(), width=PLAIN_WIDTH, record=True)
    recorder.print(_rendered(result))
    return recorder.export_html(code_format=_HTML, inline_styles=True)
