"""What `ligerprof step` prints: who holds the peak, the estimate beside it, and how fast it ran."""

from rich.console import Group, RenderableType
from rich.text import Text

from ligerprof.analyzers.estimate import MemoryEstimate
from ligerprof.reports.sweep import origin_words
from ligerprof.reports.terminal import FiguresColumn, phases_table, roles_table
from ligerprof.roles import Backend, MemoryBreakdown, Role
from ligerprof.runs.outcome import StepOutcome
from ligerprof.runs.step import StepReport
from ligerprof.units import format_bytes


def render_step(report: StepReport) -> RenderableType:
    """Lay out one step's report, at most 100 columns wide."""
    title, *subtitle = heading_lines(report)
    colour = "yellow" if report.outcome.backend is Backend.SIMULATED else "green"
    columns = figure_columns(report)
    return Group(
        Text(title, style="bold"),
        *(Text(line, style=f"bold {colour}") for line in subtitle),
        Text(verdict(report)),
        Text(""),
        phases_table(columns),
        roles_table(columns),
        *(Text(line) for line in closing_lines(report)),
    )


def figure_columns(report: StepReport) -> list[FiguresColumn]:
    """The step's figures, then its estimate's if there is one."""
    sources: list[tuple[str, StepOutcome | MemoryEstimate, MemoryBreakdown]]
    sources = [(report.outcome.backend, report.outcome, report.peak.roles)]
    if report.estimate is not None:
        sources.append(("estimated", report.estimate, report.estimate.roles))
    return [
        FiguresColumn(title=title, roles=roles, phases=figures.phases, peak_bytes=figures.peak_bytes)
        for title, figures, roles in sources
    ]


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
        asked = "an allocation" if oom.requested_bytes is None else format_bytes(oom.requested_bytes)
        return (
            f"OUT OF MEMORY in {oom.phase.value} of step {oom.step}: {asked} on top of "
            f"{format_bytes(oom.allocated_bytes)} allocated ({format_bytes(oom.reserved_bytes)} reserved) is over the "
            f"limit of {format_bytes(oom.limit_bytes)}. Held then: {shares}."
        )
    where = f" in {peak.peak_phase.value}" if peak.peak_phase else ""
    return f"The peak is {format_bytes(report.outcome.peak_bytes)}{where}: {shares}."


def closing_lines(report: StepReport) -> list[str]:
    """Reserved bytes, the first step, speed, notes, and where the run lies."""
    outcome = report.outcome
    first = f"peak {format_bytes(outcome.first_step_peak_bytes)}"
    first_reserved = f"reserved {format_bytes(outcome.first_step_reserved_bytes)}"
    lines = [f"reserved {format_bytes(outcome.reserved_bytes)}; first step: {first}, {first_reserved}"]
    if report.step_seconds is not None and report.tokens_per_second is not None:
        lines.append(
            f"{report.step_seconds * 1000:.1f} ms a step (median of {len(outcome.step_seconds)}), "
            f"{report.tokens_per_second:,.0f} tokens/s"
        )
    if outcome.host_bytes is not None:
        lines.append(f"main memory: {format_bytes(outcome.host_bytes)} more resident than before the build")
    lines += [_rank_line(rank, of_rank) for rank, of_rank in outcome.ranks.items()]
    lines += [f"note: {note}" for note in report.notes]
    lines.append(f"run: {report.run.path}")
    return lines


def _rank_line(rank: int, outcome: StepOutcome) -> str:
    end = ", out of memory" if outcome.oom is not None else ""
    reserved = format_bytes(outcome.reserved_bytes)
    return f"rank {rank}: peak {format_bytes(outcome.peak_bytes)}, reserved {reserved}, {outcome.gpu}{end}"
