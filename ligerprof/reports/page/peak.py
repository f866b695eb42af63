"""The page of `ligerprof explain --html`: the peak, its largest blocks, and the timeline, in one file."""

from collections.abc import Iterator

from ligerprof.analyzers.explain.analysis import SnapshotAnalysis
from ligerprof.analyzers.explain.peak import PeakReport
from ligerprof.reports.page.html import html_page, html_table, html_timeline, paragraph, shortened
from ligerprof.reports.peak import sentence, share
from ligerprof.roles import ROLE_MEANINGS, Role
from ligerprof.units import format_bytes, format_mib

_TOP_BLOCKS = 100


def render_peak_page(analysis: SnapshotAnalysis, *, source: str) -> str:
    """The whole page as HTML text.

    Args:
        source: the file's name, for the title.
    """
    report = analysis.peak
    phases = ", ".join(f"{phase.value} {format_bytes(size)}" for phase, size in report.phases.items())
    return html_page(
        f"{source}: memory at the peak",
        [
            paragraph(sentence(report)),
            *([paragraph(f"Highest in each phase: {phases}.")] if phases else []),
            *(paragraph(f"Note: {note}.") for note in report.notes),
            "<h2>Memory over the recording</h2>",
            html_timeline(analysis.timeline),
            "<h2>Roles at the peak</h2>",
            html_table(["role", "MiB", "share", "what"], _role_rows(report)),
            "<h2>Largest blocks at the peak</h2>",
            html_table(["role", "MiB", "blocks", "allocated in", "module", "allocated by"], _block_rows(report)),
        ],
    )


def _role_rows(report: PeakReport) -> Iterator[list[str]]:
    for role in Role:
        if report.roles[role]:
            yield [*_figures(role.value, report.roles[role], report.peak_bytes), ROLE_MEANINGS[role]]
    yield [*_figures("total", report.peak_bytes, report.peak_bytes), ""]


def _figures(name: str, size_bytes: int, peak_bytes: int) -> list[str]:
    return [name, format_mib(size_bytes), share(size_bytes, peak_bytes)]


def _block_rows(report: PeakReport) -> Iterator[list[str]]:
    for block in report.blocks[:_TOP_BLOCKS]:
        names = [shortened(block.module), shortened(block.frame)]
        yield [block.role.value, format_mib(block.size_bytes), str(block.count), block.phase.value, *names]
    rest = report.blocks[_TOP_BLOCKS:]
    if rest:
        count = sum(block.count for block in rest)
        yield [f"{len(rest)} more", format_mib(sum(block.size_bytes for block in rest)), str(count), "", "", ""]
