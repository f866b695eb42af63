"""The shared parts of HTML pages: the frame, tables, and recordings with their scripts. All text is escaped."""

import base64
import hashlib
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from ligerprof.analyzers.explain.analysis import SnapshotAnalysis
from ligerprof.reports.page.payload import recording_text
from ligerprof.reports.palette import theme_css
from ligerprof.roles import MemoryBreakdown, Role
from ligerprof.units import format_like, unbroken

_ASSETS = Path(__file__).parent / "assets"
_ROLES = {role.value: role for role in Role}
_TEXT_COLUMNS = ("meaning", "module", "allocated by", "part, MiB")
# in the order in which they refer to one another
_D3 = (
    *("array", "color", "dispatch", "ease", "format", "hierarchy", "interpolate", "selection", "time", "timer"),
    *("time-format", "scale", "transition"),
)
_LIBRARIES = ("uplot", *(f"d3-{name}" for name in _D3), "d3-flame-graph")
_OWN_SCRIPTS = ("data", "shapes", "timeline", "blocks", "flame", "segments", "events", "changes", "page")


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
    said = escape(unbroken(text))
    return f'<p class="{escape(name)}">{said}</p>' if name else f"<p>{said}</p>"


def html_bars(bars: Iterable[tuple[str, MemoryBreakdown]]) -> str:
    """A bar per title, its parts colored and sized by role, all to one scale."""
    named = [*bars]
    most = max((roles.total_bytes for _, roles in named), default=0) or 1
    shown = [role for role in Role if any(roles[role] for _, roles in named)]

    def part(role: Role, size_bytes: int) -> str:
        title = f"{role.value} {format_like(size_bytes, most)}"
        return f'<i title="{title}" style="width:{100 * size_bytes / most:.3f}%;{_role_colors(role)}"></i>'

    drawn = (
        f"<div>{escape(title)}: {format_like(roles.total_bytes, most)}</div>"
        f'<div class="stack-bar">{"".join(part(role, roles[role]) for role in shown if roles[role])}</div>'
        for title, roles in named
    )
    key = "".join(f'<span class="key">{html_swatch(role)}{role.value}</span>' for role in shown)
    return f'<div class="bars">{"".join(drawn)}<div class="legend">{key}</div></div>'


def html_swatch(role: Role) -> str:
    """A square in the color of a role."""
    return f'<i class="swatch" style="{_role_colors(role)}"></i>'


def _role_colors(role: Role) -> str:
    return f"--fill:var(--role-{role.value});--edge:var(--edge-{role.value})"


def html_table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, change: int | None = None) -> str:
    """A table of plain text; a row whose first cell is `total` is emphasized, and roles have their colors.

    Args:
        change: the column of changes in MiB, which get a bar each.
    """
    rows = [*rows]
    most = max((abs(_mib(row[change])) for row in rows), default=0) if change is not None else 0
    text = {index for index, head in enumerate(heads) if head in _TEXT_COLUMNS}

    def cells(tag: str, values: Sequence[str]) -> str:
        role = _ROLES.get(values[0]) if tag == "td" else None
        swatch = html_swatch(role) if role else ""
        found = [f"<{tag}{' class=text' * (index in text)}>" for index in range(len(values))]
        made = [
            f"{start}{swatch if index == 0 else ''}{escape(value)}</{tag}>"
            for index, (start, value) in enumerate(zip(found, values, strict=True))
        ]
        if change is not None:
            made.insert(change + 1, f"<{tag} class=text>{bar(values, role)}</{tag}>")
        return "".join(made)

    def bar(values: Sequence[str], role: Role | None) -> str:
        size = _mib(values[change or 0]) if most else 0.0
        colors = _role_colors(role) if role else "--fill:var(--mixed);--edge:var(--control)"
        # what shrank is drawn hollow
        hollow = ";background:none" if size < 0 else ""
        width = f"width:{9 * abs(size) / most:.2f}rem;" if most else ""
        return f'<i class="change-bar" style="{width}{colors}{hollow}"></i>' if size else ""

    body = "".join(f"<tr{' class=total' if row[0] == 'total' else ''}>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{cells("th", heads)}</tr>{body}</table></div>'


def _mib(text: str) -> float:
    """A figure of a table of MiB; 0 for a head."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return 0.0


def html_recording(number: int = 0, *, opened: Sequence[str] = ("flame", "segments")) -> str:
    """The places of one recording that the scripts fill: timeline, blocks, and the views below, `opened` or closed."""
    views = (
        f"<details{' open' if name in opened else ''}><summary><h2>{title}</h2></summary>"
        f'<div class="{name}-host"></div></details>'
        for name, title in (("flame", "Flame graph"), ("segments", "Segments"), ("events", "Allocator events"))
    )
    return (
        f'<div class="recording" data-source="recording-{number}">'
        '<noscript><p class="warning">The charts need JavaScript.</p></noscript>'
        '<div class="beside">'
        '<div class="timeline-host"></div>'
        '<div class="panel"><div><div class="moments moment-host"></div><div class="blocks-host"></div></div></div>'
        '<div class="legend-host"></div>'
        "</div>"
        '<div class="changes-host"></div>'
        f"{''.join(views)}"
        "</div>"
    )


def html_pair(titles: tuple[str, str]) -> str:
    """Two recordings side by side, with the same height; on a narrow screen, one above the other."""
    sections = (
        f'<section aria-label="{escape(title)}"><h3>{escape(title)}</h3>{html_recording(number, opened=())}</section>'
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
