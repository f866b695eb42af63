"""`ligerprof diff`: what grew and shrank between the peaks of two memory snapshots."""

import re
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from ligerprof.cli.command import DocumentedCommand
from ligerprof.cli.common_options import (
    FILE,
    INPUT,
    force_option,
    json_option,
    markdown_option,
    or_usage_error,
    top_option,
)
from ligerprof.cli.output import limit_json, print_markdown, show, write_output
from ligerprof.errors import DoesNotFitError, RecipeError, ResultFormatError
from ligerprof.files import require_absent
from ligerprof.snapshots.watch import watched
from ligerprof.units import parse_bytes

if TYPE_CHECKING:
    from ligerprof.analyzers.explain.peak import PeakDiff

_PERCENT = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,6})?) ?%")


class _Growth(NamedTuple):
    """A limit on growth, in bytes or in percent of the first peak."""

    text: str
    size_bytes: int = 0
    percent: Fraction | None = None

    @classmethod
    def parse(cls, text: str) -> "_Growth":
        """Read `2%`, `0%` or a size such as `100MiB`."""
        if (match := _PERCENT.fullmatch(text.strip())) is not None:
            return cls(text, percent=Fraction(match.group(1)))
        try:
            return cls(text, size_bytes=parse_bytes(text))
        except RecipeError as error:
            raise RecipeError(f"{error} A share of the first peak is written as 2%.") from None

    def highest_bytes(self, diff: "PeakDiff") -> int:
        """The highest second peak that it allows."""
        before_bytes = diff.before.peak_bytes
        return before_bytes + int(self.size_bytes if self.percent is None else before_bytes * self.percent / 100)


@click.command(cls=DocumentedCommand, name="diff")
@click.argument("before", metavar="A", type=INPUT)
@click.argument("after", metavar="B", type=INPUT)
@click.option(
    "--device-index",
    type=click.IntRange(min=0),
    metavar="N",
    help="The GPU, in both. Default: the GPU with the highest peak in each.",
)
@click.option(
    "--max-growth",
    callback=lambda _ctx, _param, text: None if text is None else or_usage_error(_Growth.parse, text),
    metavar="PERCENT|SIZE",
    help="Exit with 3 if the peak grew by more, such as 2% or 100MiB.",
)
@top_option
@click.option("--html", "html_path", type=FILE, help="Also write an HTML page with both recordings side by side.")
@force_option
@markdown_option
@json_option
@watched()
def command(  # noqa: PLR0913 - one argument per option
    *,
    before: Path,
    after: Path,
    device_index: int | None,
    max_growth: _Growth | None,
    top: int,
    html_path: Path | None,
    force: bool,
    as_markdown: bool,
    as_json: bool,
) -> None:
    """Show what grew and shrank between the peaks of two snapshots; the changes sum to their difference.

    A and B are inputs of `ligerprof explain`, or the output of its --json. Blocks are matched by role,
    module and layer, then by the function that allocated them, so that replaced classes and moved lines
    do not matter.
    """
    from ligerprof.analyzers.explain.analysis import SnapshotAnalysis
    from ligerprof.analyzers.explain.peak import diff_peaks
    from ligerprof.library import peak_of, read_peak
    from ligerprof.reports.diff import difference_sentence, render_diff
    from ligerprof.reports.markdown import diff_markdown
    from ligerprof.reports.page.peak import render_diff_page

    if html_path is not None:
        require_absent([html_path], force=force)
    sources = [read_peak(source, device_index=device_index) for source in (before, after)]
    if html_path is not None:
        analyses = [source for source in sources if isinstance(source, SnapshotAnalysis)]
        if len(analyses) < len(sources):
            raise ResultFormatError("--html needs two snapshots: the JSON of `explain` has no timeline.")
        page = render_diff_page(*analyses, sources=(before.name, after.name))
        write_output(html_path, page, force=force)
    diff = diff_peaks(*map(peak_of, sources))
    failure = diff.after.out_of_memory
    failed = failure is not None and not failure.caught
    limit_bytes = None if max_growth is None else max_growth.highest_bytes(diff)
    judged = limit_json(limit_bytes, diff.after.peak_bytes, failed=failed)
    if as_markdown and not as_json:
        print_markdown(diff_markdown(diff, top=top))
    else:
        show(lambda: {**diff.to_json(), **judged}, lambda: render_diff(diff, top=top), as_json=as_json)
    if max_growth is not None and failed:
        raise DoesNotFitError(f"memory ran out in {after}, which --max-growth {max_growth.text} does not allow.")
    if max_growth is not None and judged["fits"] is False:
        raise DoesNotFitError(f"{difference_sentence(diff)} That is over --max-growth {max_growth.text}.")
