"""`ligerprof diff`: what grew and shrank between the peaks of two memory snapshots."""

from pathlib import Path

import click

from ligerprof.analyzers.explain.analysis import analyze
from ligerprof.analyzers.explain.diff import diff_peaks
from ligerprof.cli.common_options import INPUT, force_option, json_option, top_option
from ligerprof.cli.output import say, show
from ligerprof.files import require_absent, write_new_file
from ligerprof.reports.diff import render_diff
from ligerprof.reports.page.diff import render_diff_page


@click.command(name="diff", short_help="Show what grew and shrank between two peaks.")
@click.argument("before", metavar="A.pickle", type=INPUT)
@click.argument("after", metavar="B.pickle", type=INPUT)
@click.option(
    "--device-index",
    type=click.IntRange(min=0),
    help="The GPU, in both. Default: the GPU with the highest peak in each.",
)
@top_option
@click.option(
    "--html",
    "html_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write an HTML page with both recordings side by side.",
)
@force_option
@json_option
def command(  # noqa: PLR0913 - one argument per option
    *,
    before: Path,
    after: Path,
    device_index: int | None,
    top: int,
    html_path: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Show what grew and shrank between the peaks of two snapshots; the changes sum to their difference.

    A and B are inputs of `ligerprof explain`. Blocks are matched by role, module and layer, then by
    the function that allocated them, so that replaced classes and moved lines do not matter.
    """
    if html_path is not None:
        require_absent([html_path], force=force)
    analyses = analyze(before, device_index=device_index), analyze(after, device_index=device_index)
    if html_path is not None:
        page = render_diff_page(*analyses, sources=(before.name, after.name))
        write_new_file(html_path, page, force=force)
        say(f"wrote {html_path}")
    diff = diff_peaks(*(analysis.peak for analysis in analyses))
    show(diff.to_json, lambda: render_diff(diff, top=top), as_json=as_json)
