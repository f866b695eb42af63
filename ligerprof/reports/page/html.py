"""The shared parts of HTML pages: the frame, tables, and recordings with their scripts. All text is escaped."""

import base64
import hashlib
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from ligerprof.analyzers.explain.analysis import SnapshotAnalysis
from ligerprof.reports.page.payload import recording_text
from ligerprof.reports.palette import theme_css

_ASSETS = Path(__file__).parent / "assets"
_TEXT_COLUMNS = ("meaning", "module", "allocated by")
# in the order in which they refer to one another
_D3 = (
    *("array", "color", "dispatch", "ease", "format", "hierarchy", "interpolate", "selection", "time", "timer"),
    *("time-format", "scale", "transition"),
)
_LIBRARIES = ("uplot", *(f"d3-{name}" for name in _D3), "d3-flame-graph")
_OWN_SCRIPTS = ("data", "timeline", "blocks", "flame", "segments", "changes", "page")


def html_page(title: str, parts: Iterable[str], recordings: Sequence[SnapshotAnalysis] = ()) -> str:
    """A whole page that loads nothing; only its own scripts run.

    Args:
        title: plain text.
        parts: the body as HTML.
        recordings: those that the parts show, in the order of `html_recording`'s numbers.
    """
    body = "\n".join(parts)
    scripts = _scripts() if recordings else []
    style = "".join([_read("vendor/uplot.min.css"), theme_css(), _read("page.css")])
    page = "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_policy(scripts)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{style}</style></head><body>",
            f"<header><h1>{escape(title)}</h1></header><main>",
            body,
            "</main>",
            *(_data_element(number, analysis) for number, analysis in enumerate(recordings)),
            *(f"<script>{script}</script>" for script in scripts),
            _licences() if recordings else "",
            "</body></html>\n",
        ]
    )
    # a name from a file may contain a lone surrogate, which cannot be encoded
    return page.encode("utf-8", "replace").decode("utf-8")


def paragraph(text: str, name: str = "") -> str:
    """A paragraph of plain text."""
    return f'<p class="{escape(name)}">{escape(text)}</p>' if name else f"<p>{escape(text)}</p>"


def html_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of plain text; a row whose first cell is `total` is emphasized."""
    text = {index for index, head in enumerate(heads) if head in _TEXT_COLUMNS}

    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(
            f"<{tag} class=text>{escape(value)}</{tag}>" if index in text else f"<{tag}>{escape(value)}</{tag}>"
            for index, value in enumerate(values)
        )

    body = "".join(f"<tr{' class=total' if row[0] == 'total' else ''}>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{cells("th", heads)}</tr>{body}</table></div>'


def html_recording(number: int = 0) -> str:
    """The places of one recording that the scripts fill: timeline, blocks, flame graph, segments."""
    return (
        f'<div class="recording" data-source="recording-{number}">'
        '<noscript><p class="warning">The charts need JavaScript.</p></noscript>'
        '<div class="timeline-host"></div>'
        '<div class="changes-host"></div>'
        '<div class="moments moment-host"></div>'
        '<h2>Blocks</h2><div class="blocks-host"></div>'
        '<h2>Flame graph</h2><div class="flame-host"></div>'
        '<h2>Segments</h2><div class="segments-host"></div>'
        "</div>"
    )


def html_pair(titles: tuple[str, str]) -> str:
    """Two recordings side by side, with the same height; on a narrow screen, one above the other."""
    sections = (
        f'<section aria-label="{escape(title)}"><h3>{escape(title)}</h3>{html_recording(number)}</section>'
        for number, title in enumerate(titles)
    )
    return f'<div class="linked bar"></div><div class="pair">{"".join(sections)}</div>'


def _data_element(number: int, analysis: SnapshotAnalysis) -> str:
    # base64 cannot end the element
    text = recording_text(analysis, title=analysis.replayed.source)
    return f'<script type="application/octet-stream" id="recording-{number}">{text}</script>'


def _scripts() -> list[str]:
    files = [*(f"vendor/{name}.min.js" for name in _LIBRARIES), *(f"{name}.js" for name in _OWN_SCRIPTS)]
    return [_read(file) for file in files]


def _policy(scripts: Sequence[str]) -> str:
    """A content security policy that names the page's scripts by their hashes, so that no other runs."""
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes) or "'none'"
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}; img-src data:"


def _licences() -> str:
    return f'<script type="text/plain" id="licences">\n{_read("vendor/LICENSES.txt")}</script>'


def _read(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")
