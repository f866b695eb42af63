"""The page of a step, report.html: one self-contained file."""

from collections.abc import Iterable, Iterator, Sequence

from ligerprof.reports.figures.memory import RolesBar, draw_roles
from ligerprof.reports.figures.style import svg_text
from ligerprof.reports.page.html import html_page, html_recording, html_table, paragraph
from ligerprof.reports.page.peak import html_ranks
from ligerprof.reports.step import closing_lines, figure_columns, heading_lines, verdict_lines
from ligerprof.reports.terminal import FiguresColumn, percent_error
from ligerprof.roles import Role, shown_phases
from ligerprof.runs.step import StepReport
from ligerprof.units import format_mib, in_one_unit

_BARS_INCHES = 8.0


@in_one_unit(lambda report: max(report.outcome.highest_reserved_bytes, report.limit_bytes or 0))
def render_page(report: StepReport) -> str:
    """The whole page as HTML text, with figures as inline SVG."""
    columns = figure_columns(report)
    title, *subtitle = heading_lines(report)
    return html_page(
        title,
        [
            *(paragraph(line, report.outcome.backend) for line in subtitle),
            *(paragraph(line) for line in verdict_lines(report)),
            f"<h2>Roles at the {'peak' if report.failure is None else 'failure'}</h2>",
            f'<div class="figure">{_svg(columns)}</div>',
            html_table(["role", *_figure_heads(columns), "meaning"], _role_rows(columns)),
            *_phases(report, columns),
            *([] if report.ranks is None else html_ranks(report.ranks)),
            "<h2>Memory over the recording</h2>",
            html_recording(),
            *(paragraph(line) for line in closing_lines(report)),
        ],
        [report.analysis],
    )


def _phases(report: StepReport, columns: Sequence[FiguresColumn]) -> Iterator[str]:
    if report.outcome.oom is None:
        yield "<h2>Phases</h2>"
        yield html_table(["phase", *_figure_heads(columns)], _phase_rows(columns))


def _figure_heads(columns: Sequence[FiguresColumn]) -> list[str]:
    heads = [f"{column.title}, MiB" for column in columns]
    return heads if len(columns) == 1 else [*heads, "error"]


def _figure_cells(sizes: Sequence[int]) -> list[str]:
    cells = [format_mib(size_bytes) for size_bytes in sizes]
    return cells if len(sizes) == 1 else [*cells, percent_error(sizes[1], sizes[0])]


def _role_rows(columns: Sequence[FiguresColumn]) -> Iterable[list[str]]:
    for role in Role:
        sizes = [column.roles[role] for column in columns]
        if any(sizes):
            yield [role.value, *_figure_cells(sizes), role.meaning]
    yield ["total", *_figure_cells([column.roles.total_bytes for column in columns]), ""]


def _phase_rows(columns: Sequence[FiguresColumn]) -> Iterable[list[str]]:
    for phase in shown_phases(*(column.phases for column in columns)):
        yield [phase.value, *_figure_cells([column.phases.get(phase, 0) for column in columns])]


def _svg(columns: Sequence[FiguresColumn]) -> str:
    bars = [RolesBar(title=column.title, roles=column.roles) for column in columns]
    markup = svg_text(draw_roles(bars, width_inches=_BARS_INCHES))
    # the XML declaration before it is not valid inside HTML
    return markup[markup.index("<svg") :]
