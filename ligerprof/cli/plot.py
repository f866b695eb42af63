"""`ligerprof plot`: figures from sweeps, runs, recordings and bench records, as PNG and SVG."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ligerprof.cli.common_options import folder_option, force_option, json_option
from ligerprof.cli.options import RecipeCommand, recipe_options
from ligerprof.cli.output import print_json, say
from ligerprof.errors import RecipeError
from ligerprof.files import require_absent
from ligerprof.recipe.training import RECIPE_OPTIONS, TrainingRecipe
from ligerprof.reports.figures.kinds import KINDS, OF_A_RECIPE, Drawn, NothingToDrawError, PlotInput, draw
from ligerprof.reports.figures.sources import Sources, read_sources
from ligerprof.reports.figures.style import FORMATS, check_format, write_figure
from ligerprof.runs.sweep.cells import CellStatus


@click.command(
    cls=RecipeCommand, name="plot", short_help="Draw figures from sweeps, runs, recordings and bench records."
)
@click.argument("sources", metavar="SWEEP|RUN|FILE…", nargs=-1, type=click.Path(exists=True, path_type=Path))
@folder_option("The folder for the figures; made where it is not there.", Path("figures"))
@click.option(
    "--kind",
    "kinds",
    type=click.Choice(tuple(KINDS)),
    multiple=True,
    help="What to draw; may be repeated. Default: all that the sources allow; planes where there are none.",
)
@click.option(
    "--format",
    "formats",
    default="png,svg",
    show_default=True,
    metavar="NAMES",
    help=f"File formats joined by commas: {', '.join(FORMATS)}.",
)
@recipe_options
@force_option
@json_option
def command(recipe: TrainingRecipe, sources: tuple[Path, ...], **options: Any) -> None:
    """Draw figures from sweeps, runs, recordings and bench records.

    A source is the folder or the results.jsonl of a sweep, a run directory, what `step --json` printed, a
    memory snapshot, or records of `bench`; rows of several sources count as one sweep, of a cell that is
    in two the later. The options of a recipe are for `--kind planes`, which needs no source.
    """
    formats = _formats(options["formats"])
    kinds = options["kinds"] or _default_kinds(sources)
    if OF_A_RECIPE not in kinds:
        _refuse_recipe_options(click.get_current_context())
    given = PlotInput(sources=read_sources(sources), recipe=recipe)
    _tell_failed(given.sources)
    drawn, left_out = _draw_all(kinds, given, required=bool(options["kinds"]))
    files = _write(drawn, options["output"], formats, force=options["force"])
    if options["as_json"]:
        print_json({"schema": 1, "kind": "plot", "figures": files, "left_out": left_out})
    else:
        for figure in files:
            click.echo("\n".join(figure["files"]))


def _default_kinds(sources: Sequence[Path]) -> tuple[str, ...]:
    return tuple(name for name in KINDS if (name == OF_A_RECIPE) == (not sources))


def _formats(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        check_format(name)
    return names


def _refuse_recipe_options(ctx: click.Context) -> None:
    """Refuse options that nothing would be drawn from, rather than pass over them."""
    for name, declared in RECIPE_OPTIONS.items():
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise RecipeError(
                f"{declared.flag} is for --kind {OF_A_RECIPE}; sources carry their own recipes. Leave it out."
            )


def _tell_failed(sources: Sources) -> None:
    failed = [cell for cell in sources.cells if cell.status is CellStatus.FAILED]
    if failed:
        say(f"left out: {len(failed)} failed cell{'s' * (len(failed) > 1)}, such as {failed[0].recipe.summary}")


def _draw_all(
    kinds: Sequence[str], given: PlotInput, *, required: bool
) -> tuple[list[tuple[str, Drawn]], list[dict[str, str]]]:
    """Every figure, and the kinds that the sources do not allow.

    Args:
        required: whether each kind was asked for by name.

    Raises:
        NothingToDrawError: a required kind cannot be drawn, or none can.
    """
    drawn: list[tuple[str, Drawn]] = []
    left_out: list[dict[str, str]] = []
    for kind in kinds:
        try:
            drawn += [(kind, one) for one in draw(kind, given)]
        except NothingToDrawError as error:
            if required:
                raise
            left_out.append({"kind": kind, "reason": str(error)})
    if not drawn:
        raise NothingToDrawError("nothing to draw from. Name a sweep, a run, a memory snapshot or bench records.")
    return drawn, left_out


def _write(
    drawn: Sequence[tuple[str, Drawn]], folder: Path, formats: Sequence[str], *, force: bool
) -> list[dict[str, Any]]:
    """Write every figure in every format, or none where one stands in the way."""
    files = [
        {"kind": kind, "name": one.name, "files": [str(folder / f"{one.name}.{name}") for name in formats]}
        for kind, one in drawn
    ]
    require_absent((Path(path) for entry in files for path in entry["files"]), force=force)
    for (_, one), entry in zip(drawn, files, strict=True):
        for path in map(Path, entry["files"]):
            write_figure(one.figure, path, force=force)
    return files
