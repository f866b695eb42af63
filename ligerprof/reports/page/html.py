"""The shared parts of HTML pages: the frame, tables, and the timeline of roles. All text is escaped."""

import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from ligerprof.analyzers.explain.timeline import RoleTimeline, Running
from ligerprof.reports.figures.style import ROLE_LOOKS
from ligerprof.snapshots.trace import Int64s

_HERE = Path(__file__).parent
_TEXT_COLUMNS = ("meaning", "module", "allocated by")
# bounds the size of a page, since names come from a file
_LONGEST_NAME = 160
# the page loads nothing, and only its own script runs
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def html_page(title: str, parts: Iterable[str]) -> str:
    """A whole page; `title` is plain text, `parts` are the body as HTML."""
    style = (_HERE / "page.css").read_text(encoding="utf-8")
    page = "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{style}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            *parts,
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


def html_timeline(timeline: RoleTimeline) -> str:
    """Memory over a recording, stacked by role, with zoom and hover; at most one per page."""
    legend = "".join(
        f'<button type="button" data-role="{role.value}" aria-pressed="true" title="{escape(role.meaning)}">'
        f'<i style="background:{ROLE_LOOKS[role].color}"></i>{role.value}</button>'
        for role in timeline.roles
    )
    script = (_HERE / "timeline.js").read_text(encoding="utf-8")
    return (
        '<div id="timeline"><div class="bar">'
        '<button type="button" data-act="in" aria-label="zoom in">+</button>'
        '<button type="button" data-act="out" aria-label="zoom out">&minus;</button>'
        '<button type="button" data-act="peak">peak</button><button type="button" data-act="all">all</button>'
        '<span class="range"></span></div>'
        '<canvas tabindex="0" role="img" aria-label="allocated bytes by role over the recording; the tables on this'
        ' page give the peak in numbers"></canvas>'
        f'<div class="bar">{legend}<span class="key"><i class="line"></i>reserved</span></div>'
        '<div class="tip" hidden></div></div>'
        f'<script type="application/json" id="timeline-data">{_json(_payload(timeline))}</script>'
        f"<script>{script}</script>"
    )


def _payload(timeline: RoleTimeline) -> dict[str, Any]:
    """The script's data; columns of numbers are stored as differences, which are shorter."""
    running: dict[tuple[int, str, str], int] = {}
    ran = [running.setdefault(_ran(moment), len(running)) for moment in timeline.running]
    return {
        "last_moment": timeline.last_moment,
        "peak_column": timeline.peak_column,
        "starts": _differences(timeline.starts),
        "moments": _differences(timeline.moments),
        "reserved": _differences(timeline.reserved_bytes),
        "roles": [
            {
                "name": role.value,
                "color": ROLE_LOOKS[role].color,
                "bytes": _differences(sizes),
                "holdings": [
                    [holding.column, *holding.largest] for holding in timeline.holdings if holding.role is role
                ],
            }
            for role, sizes in timeline.roles.items()
        ],
        "holders": [[shortened(holder.module), shortened(holder.frame)] for holder in timeline.holders],
        "running": list(running),
        "ran": ran,
    }


def _ran(moment: Running) -> tuple[int, str, str]:
    place = f"{moment.module} ({moment.node})" if moment.module and moment.node else moment.module or moment.node
    return moment.step, moment.phase.value if moment.phase else "", shortened(place)


def shortened(name: str) -> str:
    """A name from a file, truncated if it is very long."""
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"


def _differences(values: Int64s) -> list[int]:
    differences: list[int] = np.diff(values, prepend=0).tolist()
    return differences


def _json(values: Any) -> str:
    """JSON that cannot end the surrounding script element, regardless of the text in it."""
    text = json.dumps(values, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
