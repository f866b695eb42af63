"""The page of `ligerprof explain --html`: the peak, its largest blocks, and the timeline, in one file."""

from collections.abc import Iterable, Iterator, Sequence

from ligerprof.analyzers.explain.analysis import SnapshotAnalysis
from ligerprof.analyzers.explain.failure import FailedAllocation
from ligerprof.reports.failure import failure_lines, growth_lines
from ligerprof.reports.page.html import html_page, html_recording, html_table, paragraph
from ligerprof.reports.peak import largest_bytes, phase_lines, sentence
from ligerprof.reports.terminal import percent_share
from ligerprof.roles import MemoryBreakdown, Role
from ligerprof.units import format_like, format_mib, in_one_unit


@in_one_unit(lambda analysis, **_: largest_bytes(analysis.peak))
def render_peak_page(analysis: SnapshotAnalysis, *, source: str) -> str:
    """The whole page as HTML text; `source` is the file's name, for the title."""
    is_failure = analysis.peak.out_of_memory is not None
    title = f"{source}: out of memory" if is_failure else f"{source}: memory at the peak"
    return html_page(title, [*peak_parts(analysis, notes=analysis.peak.notes)], [analysis])


def peak_parts(analysis: SnapshotAnalysis, *, notes: Iterable[str] = ()) -> Iterator[str]:
    """What the page says and shows about the page's first recording."""
    report = analysis.peak
    oom = report.out_of_memory
    failure = [] if oom is None else failure_lines(oom)
    moments = [("peak", report.roles)] if oom is None else [("failure", oom.roles), ("peak", report.roles)]
    if oom is not None:
        yield paragraph(failure[0], "failure-line")
        yield _failure_figures(oom)
        grew = [*growth_lines(oom)]
        yield from (paragraph(line, "" if line in grew else "muted") for line in failure[1:])
    yield from (paragraph(line, "" if oom is None else "muted") for line in (sentence(report), *phase_lines(report)))
    yield from (paragraph(f"Note: {note}.") for note in notes)
    yield "<h2>Memory over the recording</h2>"
    yield html_recording()
    yield "<h2>Roles</h2>"
    yield html_table(
        ["role", *(head for name, _ in moments for head in (f"{name}, MiB", "share")), "meaning"],
        _role_rows([roles for _, roles in moments]),
    )


def _failure_figures(oom: FailedAllocation) -> str:
    """What was requested, what was free and what was missing, as large figures."""
    total = max(oom.requested_bytes, oom.missing_bytes or 0)
    figures = [("requested", oom.requested_bytes, ""), ("free, reserved but unallocated", oom.reserved_free_bytes, "")]
    if oom.missing_bytes is not None:
        bound = "missing, at most" if oom.missing_is_bound else "missing"
        figures.append((bound, oom.missing_bytes, " class=failure"))
    parts = (f"<div><dt>{name}</dt><dd{mark}>{format_like(size, total)}</dd></div>" for name, size, mark in figures)
    return f'<dl class="figures">{"".join(parts)}</dl>'


def _role_rows(moments: Sequence[MemoryBreakdown]) -> Iterator[list[str]]:
    def cells(sizes: Iterable[int]) -> list[str]:
        figures = zip(sizes, moments, strict=True)
        return [text for size, roles in figures for text in (format_mib(size), percent_share(size, roles.total_bytes))]

    for role in Role:
        if any(roles[role] for roles in moments):
            yield [role.value, *cells(roles[role] for roles in moments), role.meaning]
    yield ["total", *cells(roles.total_bytes for roles in moments), ""]
