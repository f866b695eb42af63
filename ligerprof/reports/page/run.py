"""The page of a step, report.html: one file that loads nothing else."""

from collections.abc import Iterable, Sequence

from ligerprof.reports.figures.roles import RolesBar, draw_roles
from ligerprof.reports.figures.style import svg_text
from ligerprof.reports.page.html import html_page, html_table, html_timeline, paragraph
from ligerprof.reports.step import closing_lines, heading_lines, verdict
from ligerprof.reports.terminal import RolesColumn, percent_error
from ligerprof.roles import ROLE_MEANINGS, STEP_PHASES, Role
from ligerprof.runs.step import StepReport
from ligerprof.units import format_mib

_TOP_BLOCKS = 25
_BARS_INCHES = 8.0


def render_page(report: StepReport) -> str:
    """The whole page as HTML text, with figures as inline SVG."""
    estimated = report.estimate
    columns = [RolesColumn(title=report.outcome.backend, roles=report.peak.roles)]
    if estimated is not None:
        columns.append(RolesColumn(title="estimated", roles=estimated.roles))
    title, *subtitle = heading_lines(report)
    return html_page(
        title,
        [
            *(paragraph(line, report.outcome.backend) for line in subtitle),
            paragraph(verdict(report)),
            "<h2>Roles at the peak</h2>",
            _svg(columns),
            html_table(["role", *_figure_heads(columns), "what"], _role_rows(columns)),
            "<h2>Phases</h2>",
            html_table(["phase", *_figure_heads(columns)], _phase_rows(report)),
            "<h2>Memory over the recording</h2>",
            html_timeline(report.analysis.timeline),
            "<h2>Largest blocks at the peak</h2>",
            html_table(["role", "MiB", "blocks", "module", "allocated by"], _block_rows(report)),
            *(paragraph(line) for line in closing_lines(report)),
        ],
    )


def _figure_heads(columns: Sequence[RolesColumn]) -> list[str]:
    heads = [f"{column.title}, MiB" for column in columns]
    return heads if len(columns) == 1 else [*heads, "error"]


def _figure_cells(sizes: Sequence[int]) -> list[str]:
    cells = [format_mib(size_bytes) for size_bytes in sizes]
    return cells if len(sizes) == 1 else [*cells, percent_error(sizes[1], sizes[0])]


def _role_rows(columns: Sequence[RolesColumn]) -> Iterable[list[str]]:
    for role in Role:
        sizes = [column.roles[role] for column in columns]
        if any(sizes):
            yield [role.value, *_figure_cells(sizes), ROLE_MEANINGS[role]]
    yield ["total", *_figure_cells([column.roles.total_bytes for column in columns]), ""]


def _phase_rows(report: StepReport) -> Iterable[list[str]]:
    sources = [report.outcome.phases] if report.estimate is None else [report.outcome.phases, report.estimate.phases]
    for phase in STEP_PHASES:
        yield [phase.value, *_figure_cells([phases.get(phase, 0) for phases in sources])]


def _block_rows(report: StepReport) -> Iterable[list[str]]:
    for block in report.peak.blocks[:_TOP_BLOCKS]:
        yield [block.role.value, format_mib(block.size_bytes), str(block.count), block.module, block.frame]


def _svg(columns: Sequence[RolesColumn]) -> str:
    bars = [RolesBar(title=column.title, roles=column.roles) for column in columns]
    markup = svg_text(draw_roles(bars, width_inches=_BARS_INCHES))
    # the XML declaration before it is not valid inside HTML
    return f'<div class="figure">{markup[markup.index("<svg") :]}</div>'
