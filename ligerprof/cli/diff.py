"""`ligerprof diff`: what grew and shrank between the peaks of two memory snapshots."""

from pathlib import Path

import click

from ligerprof.analyzers.explain.analysis import explain
from ligerprof.analyzers.explain.diff import diff_peaks
from ligerprof.cli.common_options import INPUT, json_option, top_option
from ligerprof.cli.output import show
from ligerprof.reports.diff import render_diff


@click.command(name="diff", short_help="Show what grew and shrank between two peaks.")
@click.argument("before", metavar="A.pickle", type=INPUT)
@click.argument("after", metavar="B.pickle", type=INPUT)
@click.option(
    "--device-index",
    type=click.IntRange(min=0),
    help="The GPU, in both. Default: the GPU with the highest peak in each.",
)
@top_option
@json_option
def command(before: Path, after: Path, device_index: int | None, top: int, as_json: bool) -> None:
    """Show what grew and shrank between the peaks of two snapshots; the changes sum to their difference.

    A and B are inputs of `ligerprof explain`. Blocks are matched by role, module and layer, then by
    the function that allocated them, so that replaced classes and moved lines do not matter.
    """
    diff = diff_peaks(explain(before, device_index=device_index), explain(after, device_index=device_index))
    show(diff.to_json, lambda: render_diff(diff, top=top), as_json=as_json)
