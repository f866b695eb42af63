"""`ligerprof diff`: what grew and shrank between the peaks of two memory snapshots."""

from pathlib import Path

import click

from ligerprof.analyzers.explain.analysis import explain
from ligerprof.analyzers.explain.diff import diff_peaks
from ligerprof.cli.common_options import json_option, top_option
from ligerprof.cli.output import print_json


@click.command(name="diff", short_help="Show what grew and shrank between two peaks.")
@click.argument("before", metavar="A.pickle", type=click.Path(exists=True, path_type=Path))
@click.argument("after", metavar="B.pickle", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--device-index", type=click.IntRange(min=0), help="Which GPU of both. Default: of each the one that peaks highest."
)
@top_option
@json_option
def command(before: Path, after: Path, device_index: int | None, top: int, as_json: bool) -> None:
    """Show what grew and shrank between the peaks of two memory snapshots; it adds up to their difference.

    A and B are snapshots as `ligerprof explain` takes them, or directories of runs. Blocks are
    matched by role, module and layer, then by the function that asked: swapped classes and
    moved lines change nothing.
    """
    diff = diff_peaks(explain(before, device_index=device_index), explain(after, device_index=device_index))
    if as_json:
        print_json(diff.to_json())
        return
    from ligerprof.reports.diff import render_diff
    from ligerprof.reports.terminal import console

    console().print(render_diff(diff, top=top))
