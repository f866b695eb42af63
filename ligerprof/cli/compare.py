"""`ligerprof compare`: estimates, runs and snapshots side by side, role by role."""

from pathlib import Path

import click

from ligerprof.cli.command import DocumentedCommand
from ligerprof.cli.common_options import INPUT, json_option
from ligerprof.cli.output import show
from ligerprof.snapshots.watch import watched


@click.command(cls=DocumentedCommand, name="compare")
@click.argument("sources", metavar="RUN|FILE…", nargs=-1, required=True, type=INPUT)
@click.option(
    "--reference",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Column that the others are compared with, counted from 1.",
)
@click.option("--ranks", "of_ranks", is_flag=True, help="Compare the ranks of one run on several GPUs.")
@json_option
@watched()
def command(sources: tuple[Path, ...], reference: int, of_ranks: bool, as_json: bool) -> None:
    """Compare estimates, runs and snapshots: peak, phases and roles, with the error in percent.

    Each source is a run directory of `ligerprof step`, the --json output of `step`, `estimate` or
    `explain` (- reads it from standard input), or a memory snapshot. A single source is compared
    with the estimate or the simulation that it contains, or with --ranks rank by rank.
    """
    from ligerprof.analyzers.compare import compare
    from ligerprof.library import read_figures
    from ligerprof.reports.diff import render_comparison

    if of_ranks and len(sources) != 1:
        raise click.UsageError("--ranks compares the ranks of one run: give one.")
    found = [read_figures(source, of_ranks=of_ranks) for source in sources]
    columns = found[0] if len(found) == 1 else tuple(figures[0] for figures in found)
    comparison = compare(columns, reference=reference - 1)
    show(comparison.to_json, lambda: render_comparison(comparison), as_json=as_json)
