"""Render `ligerprof step` for the terminal and for TensorBoard: the peak next to the estimate, and the speed."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from ligerprof.errors import MissingDependencyError, OutputError
from ligerprof.recipe.usable_memory import outside_bytes
from ligerprof.reports.diff import ranks_sentence, ranks_tables
from ligerprof.reports.peak import blocks_table, failure_lines, holders, indented, suggestion_lines
from ligerprof.reports.sweep import origin_words
from ligerprof.reports.terminal import FiguresColumn, bold, percent_error, phases_table, roles_table, stacked
from ligerprof.roles import STEP_PHASES, Backend, Phase, Role
from ligerprof.runs.step import StepReport
from ligerprof.units import MIB, format_bytes, in_one_unit

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch.utils.tensorboard import SummaryWriter


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
    return stacked(
        bold(title),
        Text(origin, style="bold yellow" if simulated else "bold green"),
        *verdict_lines(report),
        "",
        *tables,
        *([] if report.ranks is None else [ranks_sentence(report.ranks), *ranks_tables(report.ranks)]),
        *map(indented, advice_lines(report)),
        *closing_lines(report),
    )


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


_FIGURE_INCHES = 8.0


def write_summaries(report: StepReport) -> None:
    """Write TensorBoard's scalars (peak by role and phase, estimate, error, speed), the figure and the text.

    Scalars are in MiB, seconds, tokens per second and percent.

    Raises:
        MissingDependencyError: tensorboard is not installed.
        OutputError: they cannot be written.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MissingDependencyError(
            "no TensorBoard scalars: tensorboard is not installed. Try: pip install tensorboard."
        ) from None
    folder = report.run.tensorboard
    try:
        # its thread raises errors of writing here, and again where Python would print a traceback
        with _quiet_threads(), SummaryWriter(log_dir=str(folder)) as writer:
            _write(writer, report)
    except (OSError, UnicodeEncodeError) as error:
        reason = (error.strerror or error) if isinstance(error, OSError) else "the folder's name is not UTF-8"
        raise OutputError(f"{folder}: no TensorBoard scalars ({reason}). Choose another place.") from None


@contextmanager
def _quiet_threads() -> Iterator[None]:
    before = threading.excepthook
    threading.excepthook = lambda failure: None if issubclass(failure.exc_type, OSError) else before(failure)
    try:
        yield
    finally:
        threading.excepthook = before


def _write(writer: "SummaryWriter", report: StepReport) -> None:
    number = report.outcome.profiled_step
    for tag, values in scalars(report).items():
        for step, value in values.items():
            writer.add_scalar(tag, value, step)
    writer.add_figure("peak/by_role", _figure(report), number)
    # TensorBoard renders Markdown, where a single line break is a space
    lines = [*heading_lines(report), "\n".join(verdict_lines(report)), *closing_lines(report)]
    writer.add_text("step", "\n\n".join(lines), number)


def scalars(report: StepReport) -> dict[str, dict[int, float]]:
    """Every scalar by tag and step; unknown ones, such as a simulated step's speed, are omitted.

    Peaks of the first step, and under ddp of the second, precede those of the profiled step.
    """
    outcome, backend = report.outcome, report.outcome.backend
    earlier: dict[str, tuple[int | None, ...]] = {
        f"peak_mib/{backend}": (outcome.first_step_peak_bytes, outcome.second_step_peak_bytes),
        f"reserved_mib/{backend}": (outcome.first_step_reserved_bytes, outcome.second_step_reserved_bytes),
    }
    found = {
        tag: {number: size_bytes / MIB for number, size_bytes in enumerate(sizes, 1) if size_bytes is not None}
        for tag, sizes in earlier.items()
    }
    for tag, value in _of_profiled_step(report).items():
        found.setdefault(tag, {})[outcome.profiled_step] = value
    return found


def _of_profiled_step(report: StepReport) -> dict[str, float]:
    outcome, backend = report.outcome, report.outcome.backend
    found = {
        f"peak_mib/{backend}": outcome.peak_bytes / MIB,
        f"reserved_mib/{backend}": outcome.reserved_bytes / MIB,
        **{f"phase_mib/{phase.value}": outcome.phases.get(phase, 0) / MIB for phase in STEP_PHASES},
        **{f"role_mib/{role.value}": report.peak.roles[role] / MIB for role in Role},
    }
    if report.estimate is not None:
        found["peak_mib/estimated"] = report.estimate.peak_bytes / MIB
    if report.error_ratio is not None:
        found["estimate/error_percent"] = 100 * report.error_ratio
    if report.step_seconds is not None and report.tokens_per_second is not None:
        found["speed/step_seconds"] = report.step_seconds
        found["speed/tokens_per_second"] = report.tokens_per_second
    return found


def _figure(report: StepReport) -> "Figure":
    from ligerprof.reports.figures.memory import RolesBar, draw_roles

    bars = [RolesBar(title=column.title, roles=column.roles) for column in figure_columns(report)]
    return draw_roles(bars, width_inches=_FIGURE_INCHES)
