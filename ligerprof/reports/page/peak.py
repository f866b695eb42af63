"""The page of `ligerprof explain --html`: the peak, its largest blocks, and the timeline, in one file."""

from collections.abc import Iterator

from ligerprof.analyzers.explain.analysis import SnapshotAnalysis
from ligerprof.analyzers.explain.peak import PeakReport
from ligerprof.reports.failure import failure_lines
from ligerprof.reports.page.html import html_page, html_recording, html_table, paragraph
from ligerprof.reports.peak import phase_lines, sentence
from ligerprof.reports.terminal import percent_share
from ligerprof.roles import Role
from ligerprof.units import format_mib


def render_peak_page(analysis: SnapshotAnalysis, *, source: str) -> str:
    """The whole page as HTML text; `source` is the file's name, for the title."""
    report = analysis.peak
    failure = [] if report.out_of_memory is None else failure_lines(report.out_of_memory)
    return html_page(
        f"{source}: memory at the peak",
        [
            *(paragraph(line) for line in failure),
            *(paragraph(line) for line in (sentence(report), *phase_lines(report))),
            *(paragraph(f"Note: {note}.") for note in report.notes),
            "<h2>Memory over the recording</h2>",
            html_recording(),
            "<h2>Roles at the peak</h2>",
            html_table(["role", "MiB", "share", "meaning"], _role_rows(report)),
        ],
        [analysis],
    )


def _role_rows(report: PeakReport) -> Iterator[list[str]]:
    sizes = [(role.value, report.roles[role], role.meaning) for role in Role if report.roles[role]]
    for name, size_bytes, meaning in (*sizes, ("total", report.peak_bytes, "")):
        yield [name, format_mib(size_bytes), percent_share(size_bytes, report.peak_bytes), meaning]
