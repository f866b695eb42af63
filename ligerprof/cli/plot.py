"""`ligerprof plot`: figures from sweeps, runs and recordings, as PNG and SVG."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ligerprof.cli.command import DocumentedCommand
from ligerprof.cli.common_options import WordChoice, folder_option, force_option, json_option
from ligerprof.cli.output import print_json, say, stages
from ligerprof.files import require_absent
from ligerprof.reports.figures import FORMATS, KIND_NAMES
from ligerprof.serialization import document

if TYPE_CHECKING:
    from ligerprof.reports.figures.kinds import Drawn, Sources


@click.command(cls=DocumentedCommand, name="plot")
@click.argument("sources", metavar="SWEEP|RUN|FILE…", nargs=-1, type=click.Path(exists=True, path_type=Path))
@folder_option("Folder for the figures; created if it does not exist.", Path("figures"))
@click.option(
    "--kind",
    "kinds",
    type=WordChoice(KIND_NAMES),
    multiple=True,
    help="Figure to draw; may be repeated. Default: all that the sources allow.",
)
@click.option(
    "--format",
    "formats",
    default="png,svg",
    show_default=True,
    metavar="NAMES",
    help=f"File formats joined by commas: {', '.join(FORMATS)}.",
)
@force_option
@json_option
def command(sources: tuple[Path, ...], **options: Any) -> None:
    """Draw figures from sweeps, runs and recordings.

    A source is the folder or the results.jsonl of a sweep, a run directory, the output of `step --json`, or a
    memory snapshot. The rows of several sources form one sweep; the later of two rows
    of the same cell counts.
    """
    from ligerprof.reports.figures.kinds import read_sources
    from ligerprof.reports.figures.style import check_format, write_figure

    formats = tuple(dict.fromkeys(name.strip() for name in options["formats"].split(",")))
    for name in formats:
        check_format(name)
    kinds = options["kinds"] or KIND_NAMES
    given = read_sources(sources)
    _report_failed(given)
    drawn, left_out = _draw_all(kinds, given, required=bool(options["kinds"]))
    figures = [
        {"kind": kind, "name": one.name, "files": [str(options["output"] / f"{one.name}.{name}") for name in formats]}
        for kind, one in drawn
    ]
    require_absent((Path(path) for entry in figures for path in entry["files"]), force=options["force"])
    for (_, one), entry in zip(drawn, figures, strict=True):
        for path in entry["files"]:
            write_figure(one.figure, Path(path), force=options["force"])
    if options["as_json"]:
        print_json(document("plot", {"figures": figures, "left_out": left_out}))
    else:
        for entry in figures:
            click.echo("\n".join(entry["files"]))


def _report_failed(sources: "Sources") -> None:
    from ligerprof.runs.sweep.cells import CellStatus

    failed = [cell for cell in sources.cells if cell.status is CellStatus.FAILED]
    if failed:
        say(f"left out: {len(failed)} failed cell{'s' * (len(failed) > 1)}, such as {failed[0].recipe.summary}")


def _draw_all(
    kinds: Sequence[str], given: "Sources", *, required: bool
) -> "tuple[list[tuple[str, Drawn]], list[dict[str, str]]]":
    """All figures, and the kinds that sources do not allow; raises NothingToDrawError for a `required` or no figure."""
    from ligerprof.reports.figures.kinds import NothingToDrawError, draw

    drawn: list[tuple[str, Drawn]] = []
    left_out: list[dict[str, str]] = []
    with stages(len(kinds), piped=lambda _stage: None) as progress:
        for kind in kinds:
            progress(f"drawing {kind}")
            try:
                drawn += [(kind, one) for one in draw(kind, given)]
            except NothingToDrawError as error:
                if required:
                    raise
                left_out.append({"kind": kind, "reason": str(error)})
    if not drawn:
        of_memory = next((each["reason"] for each in left_out if each["kind"] == "memory"), None)
        raise NothingToDrawError(
            of_memory
            if of_memory and given.snapshots and not given.cells
            else "nothing to draw from. Name a sweep, a run or a memory snapshot."
        )
    return drawn, left_out
