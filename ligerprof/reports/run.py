"""Render `ligerprof run`: what was recorded, the worst rank, and what holds its peak."""

from typing import TYPE_CHECKING

from ligerprof.reports.peak import render_peak
from ligerprof.reports.ranks import render_ranks
from ligerprof.reports.terminal import file_text
from ligerprof.runs.recording.collected import CommandReport, RecordedRank
from ligerprof.units import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType


def render_run(report: CommandReport, *, top: int = 10) -> "RenderableType":
    """Lay out the report, at most 100 columns wide, with `top` rows of blocks."""
    from rich.console import Group

    parts: list[RenderableType] = []
    if report.compared is not None and len(report.ranks) > 1:
        parts.append(render_ranks(report.compared, top=top))
    for worst in report.ranks[:1]:
        parts += [file_text(line) for line in _lines(worst, of_several=len(report.ranks) > 1)]
        parts.append(render_peak(worst.report, top=top))
    parts += [file_text(f"Note: {note}.") for note in report.notes]
    if report.ranks:
        parts.append(file_text(f"The recording is in {report.output}; `ligerprof explain {report.output}` reads it."))
    return Group(*parts)


def _lines(recorded: RecordedRank, *, of_several: bool) -> list[str]:
    """The steps that were recorded, and the one with the peak."""
    summary, step = recorded.summary, recorded.report.peak_step
    who = f"Rank {recorded.peak.rank} ran" if of_several else "The command ran"
    if not summary.steps:
        return [f"{who} no training step."]
    ran = f"{who} {summary.steps} training step{'s' if summary.steps > 1 else ''}"
    if step is None:
        return [f"{ran}."]
    where = f"in step {step}" if step else "before the first step"
    if summary.last_recorded is not None:
        ran += f", recorded up to step {summary.last_recorded}"
    return [f"{ran}; the peak of {format_bytes(recorded.report.peak_bytes)} came {where}."]
