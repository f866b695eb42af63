"""Render `ligerprof step`: the peak by role and phase next to the estimate, and the speed."""

from rich.console import Group, RenderableType
from rich.text import Text

from ligerprof.reports.sweep import origin_words
from ligerprof.reports.terminal import FiguresColumn, phases_table, roles_table
from ligerprof.roles import Backend, Role
from ligerprof.runs.step import StepReport
from ligerprof.units import format_bytes


def render_step(report: StepReport) -> RenderableType:
    """Lay out one step's report, at most 100 columns wide."""
    title, origin = heading_lines(report)
    columns = figure_columns(report)
    simulated = report.outcome.backend is Backend.SIMULATED
    return Group(
        Text(title, style="bold"),
        Text(origin, style="bold yellow" if simulated else "bold green"),
        Text(verdict(report)),
        Text(""),
        phases_table(columns),
        roles_table(columns),
        *(Text(line) for line in closing_lines(report)),
    )


def figure_columns(report: StepReport) -> list[FiguresColumn]:
    """The step's figures, then its estimate's if there is one."""
    outcome, estimate = report.outcome, report.estimate
    title, peak_bytes = outcome.backend, outcome.peak_bytes
    columns = [FiguresColumn(title=title, roles=report.peak.roles, phases=outcome.phases, peak_bytes=peak_bytes)]
    if estimate is not None:
        peak_bytes = estimate.peak_bytes
        columns.append(
            FiguresColumn(title="estimated", roles=estimate.roles, phases=estimate.phases, peak_bytes=peak_bytes)
        )
    return columns


def heading_lines(report: StepReport) -> list[str]:
    """The recipe, and whether the step was measured or simulated."""
    return [report.recipe.summary, origin_words(report.outcome.backend, report.outcome.gpu)]


def verdict(report: StepReport) -> str:
    """The peak in a sentence, or why the step did not fit."""
    peak, oom = report.peak, report.outcome.oom
    holders = sorted((role for role in Role if peak.roles[role]), key=lambda role: -peak.roles[role])[:3]
    shares = ", ".join(
        f"{role.value} {format_bytes(peak.roles[role])} ({100 * peak.roles[role] / peak.peak_bytes:.0f} %)"
        for role in holders
    )
    if oom is not None:
        requested = "an allocation" if oom.requested_bytes is None else format_bytes(oom.requested_bytes)
        return (
            f"OUT OF MEMORY in {oom.phase.value} of step {oom.step}: {requested} on top of "
            f"{format_bytes(oom.allocated_bytes)} allocated ({format_bytes(oom.reserved_bytes)} reserved) is over the "
            f"limit of {format_bytes(oom.limit_bytes)}. Held then: {shares}."
        )
    where = f" in {peak.peak_phase.value}" if peak.peak_phase else ""
    return f"The peak is {format_bytes(report.outcome.peak_bytes)}{where}: {shares}."


def closing_lines(report: StepReport) -> list[str]:
    """Reserved bytes, the first step, speed, notes, and the run directory."""
    outcome = report.outcome
    reserved, first_reserved = format_bytes(outcome.reserved_bytes), format_bytes(outcome.first_step_reserved_bytes)
    first_peak = format_bytes(outcome.first_step_peak_bytes)
    lines = [f"reserved {reserved}; first step: peak {first_peak}, reserved {first_reserved}"]
    if report.step_seconds is not None and report.tokens_per_second is not None:
        lines.append(
            f"{report.step_seconds * 1000:.1f} ms per step (median of {len(outcome.step_seconds)}), "
            f"{report.tokens_per_second:,.0f} tokens/s"
        )
    if outcome.host_bytes is not None:
        lines.append(f"main memory: {format_bytes(outcome.host_bytes)} more resident than before the build")
    for rank, own in outcome.ranks.items():
        end = ", out of memory" if own.oom is not None else ""
        peak, reserved = format_bytes(own.peak_bytes), format_bytes(own.reserved_bytes)
        lines.append(f"rank {rank}: peak {peak}, reserved {reserved}, {own.gpu}{end}")
    lines += [f"note: {note}" for note in report.notes]
    lines.append(f"run: {report.run.path}")
    return lines
