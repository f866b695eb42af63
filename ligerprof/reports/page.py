"""report.html: one self-contained page of a step, for the browser; nothing is loaded from anywhere."""

import io
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from ligerprof.reports.figures import draw_roles, draw_timeline
from ligerprof.reports.step import closing_lines, heading_lines, verdict
from ligerprof.reports.terminal import RolesColumn, percent_error
from ligerprof.roles import ROLE_MEANINGS, STEP_PHASES, Role
from ligerprof.runs.step import StepReport
from ligerprof.snapshots.reader import Snapshot
from ligerprof.snapshots.replay import replay
from ligerprof.units import format_mib

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TOP_BLOCKS = 25
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2833; --paper: #fdfefe; --rule: #d5d8dc; --card: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --ink: #eaeded; --paper: #17202a; --rule: #424949; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.simulated { color: #b9770e; font-weight: 600; }
.figure { background: var(--card); border-radius: 6px; overflow-x: auto; }
.figure svg { width: 100%; height: auto; min-width: 30rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.15rem 0.8rem 0.15rem 0; text-align: right; border-bottom: 1px solid var(--rule); }
th:first-child, td:first-child, td.text, th.text { text-align: left; }
tr.total td { font-weight: 600; }
"""


def render_page(report: StepReport) -> str:
    """The whole page as HTML text, figures inlined as SVG."""
    estimated = report.estimate
    columns = [RolesColumn(title=report.outcome.backend, roles=report.peak.roles)]
    if estimated is not None:
        columns.append(RolesColumn(title="estimated", roles=estimated.roles))
    timeline = draw_timeline(replay(Snapshot.from_dict(report.outcome.snapshot), report.peak.device))
    title, *subtitle = heading_lines(report)
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            *(f'<p class="{report.outcome.backend}">{escape(line)}</p>' for line in subtitle),
            f"<p>{escape(verdict(report))}</p>",
            "<h2>Who holds the peak</h2>",
            _svg(draw_roles(columns)),
            _table(["role", *_figure_heads(columns), "what"], _role_rows(columns)),
            "<h2>Phases</h2>",
            _table(["phase", *_figure_heads(columns)], _phase_rows(report)),
            "<h2>Memory over the recording</h2>",
            _svg(timeline),
            "<h2>Largest blocks at the peak</h2>",
            _table(["role", "MiB", "blocks", "module", "asked for by"], _block_rows(report)),
            *(f"<p>{escape(line)}</p>" for line in closing_lines(report)),
            "</body></html>\n",
        ]
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


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    text = {index for index, head in enumerate(heads) if head in ("what", "module", "asked for by")}

    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(
            f"<{tag} class=text>{escape(value)}</{tag}>" if index in text else f"<{tag}>{escape(value)}</{tag}>"
            for index, value in enumerate(values)
        )

    body = "".join(f"<tr{' class=total' if row[0] == 'total' else ''}>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{cells("th", heads)}</tr>{body}</table></div>'


def _svg(figure: "Figure") -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    markup = buffer.getvalue()
    # what comes before is the XML declaration, which has no place inside HTML
    return f'<div class="figure">{markup[markup.index("<svg") :]}</div>'
