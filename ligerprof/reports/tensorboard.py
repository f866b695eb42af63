"""Scalars of a step for TensorBoard, beside the profiler's trace."""

from ligerprof.errors import MissingDependencyError
from ligerprof.roles import STEP_PHASES, Role
from ligerprof.runs.step import StepReport
from ligerprof.units import MIB


def write_scalars(report: StepReport) -> None:
    """Write peaks by role and phase, the estimate, reserved bytes and latency as scalars, in MiB and seconds.

    Raises:
        MissingDependencyError: tensorboard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MissingDependencyError(
            "no TensorBoard scalars: tensorboard is not installed. Try: pip install 'ligerprof[tensorboard]'."
        ) from None
    number = report.outcome.profiled_step
    with SummaryWriter(log_dir=str(report.run.tensorboard)) as writer:
        for tag, value in _scalars(report).items():
            writer.add_scalar(tag, value, number)


def _scalars(report: StepReport) -> dict[str, float]:
    outcome, backend = report.outcome, report.outcome.backend
    scalars = {
        f"peak_mib/{backend}": outcome.peak_bytes / MIB,
        f"reserved_mib/{backend}": outcome.reserved_bytes / MIB,
        **{f"phase_mib/{phase.value}": outcome.phases.get(phase, 0) / MIB for phase in STEP_PHASES},
        **{f"role_mib/{role.value}": report.peak.roles[role] / MIB for role in Role},
    }
    if report.estimate is not None:
        scalars["peak_mib/estimated"] = report.estimate.peak_bytes / MIB
    if report.step_seconds is not None and report.tokens_per_second is not None:
        scalars["speed/step_seconds"] = report.step_seconds
        scalars["speed/tokens_per_second"] = report.tokens_per_second
    return scalars
