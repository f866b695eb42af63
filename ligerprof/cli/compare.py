"""`ligerprof compare`: estimates, runs and snapshots side by side, role by role."""

from pathlib import Path

import click

from ligerprof.analyzers.compare import compare, figures_from_json, figures_from_peak, figures_of_ranks
from ligerprof.analyzers.result_reader import Figures
from ligerprof.cli.common_options import INPUT, json_option
from ligerprof.cli.output import show
from ligerprof.errors import ResultFormatError
from ligerprof.files import STANDARD_INPUT, FileKind, read_json, starts_as_json
from ligerprof.reports.compare import render_comparison
from ligerprof.runs.directory import read_result

_RESULT = FileKind(error=ResultFormatError, hint="Use the output of step, estimate or explain.")


@click.command(name="compare", short_help="Compare estimates, runs and snapshots.")
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
def command(sources: tuple[Path, ...], reference: int, of_ranks: bool, as_json: bool) -> None:
    """Compare estimates, runs and snapshots: peak, phases and roles, with the error in percent.

    Each source is a run directory of `ligerprof step`, the --json output of `step`, `estimate` or
    `explain` (- reads it from standard input), or a memory snapshot. A single source is compared
    with the estimate or the simulation that it contains, or with --ranks rank by rank.
    """
    if of_ranks and len(sources) != 1:
        raise click.UsageError("--ranks compares the ranks of one run: give one.")
    found = [_read(source, of_ranks) for source in sources]
    columns = found[0] if len(found) == 1 else tuple(figures[0] for figures in found)
    comparison = compare(columns, reference=reference - 1)
    show(comparison.to_json, lambda: render_comparison(comparison), as_json=as_json)


def _read(source: Path, of_ranks: bool) -> tuple[Figures, ...]:
    read = figures_of_ranks if of_ranks else figures_from_json
    if source.is_dir():
        return read(read_result(source), str(source))
    if of_ranks or source.suffix == ".json" or source == STANDARD_INPUT or starts_as_json(source, _RESULT):
        return read(read_json(source, _RESULT), str(source))
    # numpy is not needed for JSON files
    from ligerprof.analyzers.explain.analysis import explain

    return (figures_from_peak(explain(source), str(source)),)
