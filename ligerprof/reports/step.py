"""Render `ligerprof step`: the peak by role and phase next to the estimate, and the speed."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from ligerprof.recipe.usable_memory import outside_bytes
from ligerprof.reports.diff import ranks_sentence, ranks_tables
from ligerprof.reports.peak import blocks_table, failure_lines, holders, indented, suggestion_lines
from ligerprof.reports.sweep import origin_words
from ligerprof.reports.terminal import FiguresColumn, percent_error, phases_table, roles_table
from ligerprof.roles import Backend, Phase
from ligerprof.runs.step import StepReport
from ligerprof.units import MIB, format_bytes, in_one_unit

_TOP_BLOCKS = 10
# a GPU without processes has a few MiB in use
_IDLE_BYTES = 32 * MIB


@in_one_unit(lambda report: max(report.outcome.highest_reserved_bytes, report.limit_bytes or 0))
def render_step(report: StepReport) -> RenderableType:
    """Lay out one step's report, at most 100 columns wide."""
    title, origin = heading_lines(report)
    columns = figure_columns(report)
    simulated = report.outcome.backend is Backend.SIMULATED
    tables = [phases_table(columns)] if report.outcome.oom is None else []
    tables.append(roles_table(columns))
    if report.failure is not None:
        tables.append(blocks_table(report.failure.blocks, _TOP_BLOCKS, more="see `ligerprof explain`"))
    return Group(
        Text(title, style="bold"),
        Text(origin, style="bold yellow" if simulated else "bold green"),
        *(Text(line) for line in verdict_lines(report)),
        Text(""),
        *tables,
        *_ranks_part(report),
        *map(indented, advice_lines(report)),
        *(Text(line) for line in closing_lines(report)),
    )


def _ranks_part(report: StepReport) -> list[RenderableType]:
    return [] if report.ranks is None else [Text(ranks_sentence(report.ranks)), *ranks_tables(report.ranks)]


def figure_columns(report: StepReport) -> list[FiguresColumn]:
    """The step's figures, then its estimate's if there is one; if memory ran out, only what was held then."""
    outcome, estimate = report.outcome, report.estimate
    title, peak_bytes = outcome.backend, outcome.peak_bytes
    phases = {phase: outcome.phases[phase] for phase in report.reached_phases if phase in outcome.phases}
    if report.failure is not None:
        return [FiguresColumn(title="at the failure", roles=report.failure.roles, phases=phases)]
    columns = [FiguresColumn(title=title, roles=report.peak.roles, phases=phases, peak_bytes=peak_bytes)]
    if estimate is not None and outcome.oom is None:
        peak_bytes = estimate.peak_bytes
        columns.append(
            FiguresColumn(title="estimated", roles=estimate.roles, phases=estimate.phases, peak_bytes=peak_bytes)
        )
    return columns


def heading_lines(report: StepReport) -> list[str]:
    """The recipe, and whether the step was measured or simulated."""
    return [report.recipe.summary, origin_words(report.outcome.backend, report.outcome.gpu)]


def verdict_lines(report: StepReport) -> list[str]:
    """The peak in a sentence, or why the step did not fit and what it reached."""
    peak, oom = report.peak, report.outcome.oom
    if report.failure is not None:
        return [*failure_lines(report.failure), *_reached_lines(report)]
    if oom is not None:
        allocated, reserved = format_bytes(oom.allocated_bytes), format_bytes(oom.reserved_bytes)
        limit = format_bytes(oom.limit_bytes)
        return [
            f"Out of memory in {oom.phase.value} of step {oom.step}: {allocated} allocated.",
            f"Out of memory with {reserved} reserved, under a limit of {limit}. The recording lacks the failure.",
            *_reached_lines(report),
        ]
    where = f" in {peak.peak_phase.value}" if peak.peak_phase else ""
    lines = [f"The peak is {format_bytes(report.outcome.peak_bytes)}{where}: {holders(peak.roles)}."]
    if report.verdict is not None and report.limit_bytes is not None:
        reserved = format_bytes(report.outcome.highest_reserved_bytes)
        lines.append(f"It {report.verdict} in {format_bytes(report.limit_bytes)}: {reserved} reserved.")
    return lines


def _reached_lines(report: StepReport) -> Iterator[str]:
    """The phases that ended before memory ran out next to their estimates, and the estimate of the whole step."""
    estimate, phases = report.estimate, report.outcome.phases
    if estimate is None:
        return
    for phase in report.reached_phases:
        error = percent_error(estimate.phases[phase], phases[phase])
        yield (
            f"Reached before: {phase.value} {format_bytes(phases[phase])}, "
            f"estimated {format_bytes(estimate.phases[phase])} ({error})."
        )
    peak = format_bytes(estimate.peak_bytes)
    yield f"Estimated for a whole step: {peak}, in {estimate.peak_phase.value}."


def advice_lines(report: StepReport) -> Iterator[str]:
    """What would have let the step pass, if memory ran out."""
    if report.outcome.oom is not None:
        yield from suggestion_lines(report.peak.suggestions)


def closing_lines(report: StepReport) -> list[str]:
    """Reserved bytes, the first step, speed, notes, and the run directory."""
    outcome = report.outcome
    reserved, first_reserved = format_bytes(outcome.reserved_bytes), format_bytes(outcome.first_step_reserved_bytes)
    first_peak = format_bytes(outcome.first_step_peak_bytes)
    lines = [f"reserved {reserved}; first step: peak {first_peak}, reserved {first_reserved}"]
    if outcome.evaluation_reserved_bytes is not None:
        peak = format_bytes(outcome.phases[Phase.EVALUATION])
        lines.append(f"evaluation: peak {peak}, reserved {format_bytes(outcome.evaluation_reserved_bytes)}")
    if report.step_seconds is not None and report.tokens_per_second is not None:
        lines.append(
            f"{report.step_seconds * 1000:.1f} ms per step (median of {len(outcome.step_seconds)}), "
            f"{report.tokens_per_second:,.0f} tokens/s"
        )
    if outcome.host_bytes is not None:
        lines.append(f"main memory: {format_bytes(outcome.host_bytes)} more resident than before the build")
    lines += list(_beyond_the_peak(report))
    for rank, own in outcome.ranks.items() if report.ranks is None else ():
        end = ", out of memory" if own.oom is not None else ""
        peak, reserved = format_bytes(own.peak_bytes), format_bytes(own.reserved_bytes)
        lines.append(f"rank {rank}: peak {peak}, reserved {reserved}, {own.gpu}{end}")
    lines += [f"note: {note}" for note in report.notes]
    lines.append(f"run: {report.run.path}")
    return lines


def _beyond_the_peak(report: StepReport) -> Iterator[str]:
    """DDP's second step, and what the GPU holds besides torch's allocator."""
    outcome = report.outcome
    second_bytes, second_reserved_bytes = outcome.second_step_peak_bytes, outcome.second_step_reserved_bytes
    if second_bytes is not None and second_reserved_bytes is not None:
        peak, reserved = format_bytes(second_bytes), format_bytes(second_reserved_bytes)
        yield f"second step, in which DDP builds its buckets anew: peak {peak}, reserved {reserved}"
    if outcome.outside is not None and (found_bytes := outcome.outside.outside_bytes) is not None:
        expected = format_bytes(outside_bytes(report.recipe))
        others_bytes = outcome.outside.other_processes_bytes or 0
        others = f", {format_bytes(others_bytes)} of it other processes'" if others_bytes > _IDLE_BYTES else ""
        yield f"outside torch's allocator: {format_bytes(found_bytes)}{others}, expected {expected}"
