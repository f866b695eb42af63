"""The page of `ligerprof explain --html`: the peak, its largest blocks, and the timeline, in one file."""

from collections.abc import Iterable, Iterator, Sequence

from ligerprof.analyzers.explain.analysis import SnapshotAnalysis
from ligerprof.reports.failure import failure_lines
from ligerprof.reports.page.html import html_page, html_recording, html_table, paragraph
from ligerprof.reports.peak import phase_lines, sentence
from ligerprof.reports.terminal import percent_share
from ligerprof.roles import MemoryBreakdown, Role
from ligerprof.units import format_mib


def render_peak_page(analysis: SnapshotAnalysis, *, source: str) -> str:
    """The whole page as HTML text; `source` is the file's name, for the title."""
    report = analysis.peak
    oom = report.out_of_memory
    failure = [] if oom is None else failure_lines(oom)
    moments = [("peak", report.roles)] if oom is None else [("failure", oom.roles), ("peak", report.roles)]
    return html_page(
        f"{source}: memory at the peak" if oom is None else f"{source}: out of memory",
        [
            *(paragraph(line, "failure-line" if index == 0 else "") for index, line in enumerate(failure)),
            *(paragraph(line) for line in (sentence(report), *phase_lines(report))),
            *(paragraph(f"Note: {note}.") for note in report.notes),
            "<h2>Memory over the recording</h2>",
            html_recording(),
            "<h2>Roles</h2>",
            html_table(
                ["role", *(head for name, _ in moments for head in (f"{name}, MiB", "share")), "meaning"],
                _role_rows([roles for _, roles in moments]),
            ),
        ],
        [analysis],
    )


def _role_rows(moments: Sequence[MemoryBreakdown]) -> Iterator[list[str]]:
    def cells(sizes: Iterable[int]) -> list[str]:
        figures = zip(sizes, moments, strict=True)
        return [text for size, roles in figures for text in (format_mib(size), percent_share(size, roles.total_bytes))]

    for role in Role:
        if any(roles[role] for roles in moments):
            yield [role.value, *cells(roles[role] for roles in moments), role.meaning]
    yield ["total", *cells(roles.total_bytes for roles in moments), ""]
