"""Render `ligerprof watch`: the newest figures of a recorded process, and its last steps."""

from typing import TYPE_CHECKING

from ligerprof.reports.terminal import listing_table
from ligerprof.runs.recording.live import Live
from ligerprof.units import format_bytes, format_mib, in_one_unit

if TYPE_CHECKING:
    from rich.console import RenderableType

_MOST_ROWS = 8


@in_one_unit(lambda live, **_: live.limit_bytes)
def watch_lines(live: Live, *, name: str = "") -> list[str]:
    """The newest figures, and what grows."""
    last = live.samples[-1]
    now = f"{format_bytes(last.allocated_bytes)} allocated, {format_bytes(last.reserved_bytes)} reserved"
    peak = f"peak {format_bytes(last.peak_bytes)} of {format_bytes(live.limit_bytes)}"
    when = f"{'ended after' if live.ended else 'in'} step {last.step}, after {last.seconds:,.1f} s"
    lines = [f"{name}{when}: {now}, {peak}."]
    if live.fails_in_step is not None:
        failure = "" if live.ended else f" At this rate, memory runs out in about step {live.fails_in_step}."
        lines.append(f"{name}It grows by {format_bytes(live.growth_bytes)} per step.{failure}")
    return lines


def render_watch(live: Live, *, name: str = "") -> "RenderableType":
    """The lines, and a table of the last steps with their roles in MiB."""
    from rich.console import Group
    from rich.text import Text

    shown = live.samples[-_MOST_ROWS:]
    roles = list(dict.fromkeys(role for sample in shown for role in sample.roles))
    heads = ("allocated", "reserved", "peak", *roles, "other")
    rows = []
    for sample in shown:
        known = [sample.roles.get(role, 0) for role in roles]
        sizes = (sample.allocated_bytes, sample.reserved_bytes, sample.peak_bytes, *known)
        other = sample.allocated_bytes - sum(known)
        rows.append((str(sample.step), *map(format_mib, sizes), format_mib(other)))
    table = listing_table("step, MiB", *heads, right=heads, rows=rows)
    return Group(*(Text(line) for line in watch_lines(live, name=name)), table)
