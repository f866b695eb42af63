"""Write a step's TensorBoard summaries next to the profiler's trace: scalars, the peak's figure and text."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ligerprof.errors import MissingDependencyError, OutputError
from ligerprof.reports.figures.memory import RolesBar, draw_roles
from ligerprof.reports.step import closing_lines, figure_columns, heading_lines, verdict_lines
from ligerprof.roles import STEP_PHASES, Role
from ligerprof.runs.step import StepReport
from ligerprof.units import MIB

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch.utils.tensorboard import SummaryWriter

_FIGURE_INCHES = 8.0


def write_summaries(report: StepReport) -> None:
    """Write scalars (peak by role and phase, estimate, error, reserved bytes, speed), the figure and the text.

    Scalars are in MiB, seconds, tokens per second and percent.

    Raises:
        MissingDependencyError: tensorboard is not installed.
        OutputError: they cannot be written.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MissingDependencyError(
            "no TensorBoard scalars: tensorboard is not installed. Try: pip install 'ligerprof[tensorboard]'."
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
    bars = [RolesBar(title=column.title, roles=column.roles) for column in figure_columns(report)]
    return draw_roles(bars, width_inches=_FIGURE_INCHES)
