"""Render what a recording would have reserved under other settings of the allocator."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ligerprof.analyzers.explain.alloc_settings import SettingsOutcome
from ligerprof.analyzers.explain.peak import PeakReport
from ligerprof.reports.terminal import groups_table
from ligerprof.units import format_bytes, format_mib

if TYPE_CHECKING:
    from rich.console import RenderableType

_HEADS = ("reserved", "saved", "needed", "retries")
_FIGURE_WIDTH = 8


def render_settings(report: PeakReport) -> "RenderableType":
    """The settings that were tried, best first, or why there are none."""
    from rich.console import Group
    from rich.text import Text

    tried = report.alloc_confs
    if tried is None:
        return Text(
            "Other settings of the allocator cannot be replayed: the recording does not start with an empty device, has"
            " memory pools of its own, or does not follow from its own settings."
        )
    table = groups_table(*_HEADS, who="MiB under PYTORCH_CUDA_ALLOC_CONF", figure_width=_FIGURE_WIDTH, heading_width=0)
    for one in _shown(tried):
        needed = "" if one.smallest_limit_bytes is None else format_mib(one.smallest_limit_bytes)
        passed = " lets it pass" if one.fits else ""
        table.add_row(
            format_mib(one.reserved_bytes),
            format_mib(one.saves_bytes),
            needed,
            str(one.retries),
            f"{one.alloc_conf or 'torch defaults'}{passed}",
        )
    until = " up to the failure" if report.out_of_memory is not None else ""
    text = (
        f"Other settings of the allocator, replayed{until}. As recorded, {format_bytes(report.reserved_bytes)} are"
        " reserved; needed is the least limit on reserved memory under which every request succeeds."
    )
    return Group(Text(text), table)


def _shown(tried: Sequence[SettingsOutcome]) -> Iterator[SettingsOutcome]:
    """Those that no part of them equals."""
    for one in tried:
        parts = (other for other in tried if other.conf.items() < one.conf.items())
        if not any(
            (bool(other.fits), -other.reserved_bytes) >= (bool(one.fits), -one.reserved_bytes) for other in parts
        ):
            yield one
