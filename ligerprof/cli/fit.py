"""`ligerprof fit`: the largest batch and sequence that fit a limit, and settings that make a wanted pair fit."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ligerprof.cli import command_search
from ligerprof.cli.common_options import FILE, force_option, json_option, simulate_option
from ligerprof.cli.options import RecipeCommand, recipe_options
from ligerprof.cli.output import Stages, knows_method, print_text, say_written, show, stages
from ligerprof.cli.own_file import changes_of, recipe_and_files
from ligerprof.errors import DoesNotFitError
from ligerprof.files import require_absent
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.recipe.usable_memory import find_limit
from ligerprof.units import format_bytes

if TYPE_CHECKING:
    from ligerprof.analyzers.search.budget import Verdict
    from ligerprof.analyzers.search.fastest import Candidate
    from ligerprof.analyzers.search.fit import Answered, Point

# each takes about 500 MiB, most of it shared
_MOST_PROCESSES = 4


@click.command(cls=RecipeCommand, name="fit", context_settings={"allow_interspersed_args": False})
@recipe_options
@simulate_option
@command_search.command_options
@click.option(
    "--world",
    type=click.IntRange(min=2),
    help="Of a COMMAND: find which splits of this many GPUs fit: other values of the parallel degrees that its"
    " arguments or configuration file name, or that --vary names.",
)
@command_search.output_option
@click.option(
    "--fastest",
    is_flag=True,
    help="Find the fastest recipes that fit instead: other micro-batches, checkpointing and kernels for the same"
    " training.",
)
@click.option(
    "--plan",
    "plans",
    is_flag=True,
    help="Find what each layer recomputes and keeps so that steps are fastest instead, for the same batch and kernels.",
)
@click.option(
    "--figure", type=FILE, help="Draw the frontier to this file; its suffix is the format, such as .svg or .png."
)
@force_option
@json_option
def command(  # noqa: PLR0913 - one argument per option
    recipe: TrainingRecipe,
    *,
    simulate: bool,
    fastest: bool,
    plans: bool,
    figure: Path | None,
    words: tuple[str, ...],
    copies: tuple[Path, ...],
    force: bool,
    as_json: bool,
    **search: Any,
) -> None:
    """Find what fits --memory-limit, or the memory of --gpu less the CUDA context.

    Prints the largest batch at --seq, the longest sequence at --batch, and the frontier between them. If
    --batch and --seq do not fit together, also prints the cheapest settings that make them fit. The exit
    code is 3 if the recipe fits with no batch and no sequence.

    With --fastest, lists the recipes that train as many sequences per optimizer step and fit, by predicted tokens per
    second, and the next faster one, which does not fit.

    With --plan, prints what each decoder layer recomputes, keeps or moves to main memory in the fastest step that fits.
    The exit code is 3 if none fits.

    With a COMMAND (trl sft ..., python train.py ...), finds the largest micro-batch with which it fits, by running it
    on simulated GPUs with other values in its arguments or configuration file; with --fastest, the fastest of its
    micro-batches with and without checkpointing and liger-kernel; with --world, its splits of that many GPUs. Nothing
    that it writes stays.
    """
    if (fastest or plans) and figure is not None:
        flag = "--fastest" if fastest else "--plan"
        raise click.UsageError(f"--figure draws the frontier, which {flag} does not look for.")
    if fastest and plans:
        raise click.UsageError("--fastest and --plan search for different things. Leave one out.")
    if words:
        command_search.refuse_with_command("simulate", "figure", "plans")
        search_command = command_search.fastest_command if fastest else command_search.fit_command
        search_command(
            command_search.CommandOptions(
                recipe=recipe, words=words, search=search, copies=copies, force=force, as_json=as_json
            )
        )
        return
    command_search.require_command({**search, "copies": copies})
    from ligerprof.analyzers.estimate import require_host_memory
    from ligerprof.library import fit
    from ligerprof.reports.figures.curves import draw_frontier
    from ligerprof.reports.figures.style import check_format, write_figure
    from ligerprof.reports.search import render_fit

    if figure is not None:
        check_format(figure.suffix)
        require_absent([figure], force=force)
    recipe, own = recipe_and_files(recipe)
    if fastest or plans:
        (_fit_plan if plans else _fit_fastest)(recipe, simulate=simulate, as_json=as_json)
        return
    with stages() as progress:
        tell = None if as_json else _teller(recipe, progress)
        found = fit(
            recipe,
            simulate=simulate,
            progress=progress,
            remaining=progress.remaining,
            processes=_processes(),
            **changes_of(own),
            answered=tell,
        )
    found = replace(found, wanted=_known(found.wanted))
    if figure is not None:
        write_figure(draw_frontier(found), figure, force=force)
        say_written(figure)
    show(found.to_json, lambda: render_fit(found, answered=tell is not None), as_json=as_json)
    if found.batch is None and found.seq is None and knows_method():
        require_host_memory(found.recipe)
        remedy = "Take one of the changes above." if found.nearest else "Run `ligerprof advise` for changes that help."
        raise DoesNotFitError(
            f"no batch and no sequence of this recipe fits {format_bytes(found.limit.size_bytes)}. {remedy}"
        )


def _fit_fastest(recipe: TrainingRecipe, *, simulate: bool, as_json: bool) -> None:
    """Search and print the fastest recipes; better ones are printed as they are found."""
    from rich.text import Text

    from ligerprof.library import fastest
    from ligerprof.reports.search import candidate_line, render_fastest

    with stages() as progress:

        def tell(candidate: "Candidate") -> None:
            if not as_json:
                with progress.aside():
                    print_text(Text(candidate_line(candidate)))

        found = fastest(recipe, simulate=simulate, progress=progress, better=tell, processes=_processes())
    show(found.to_json, lambda: render_fastest(found), as_json=as_json)
    if not found.found:
        raise DoesNotFitError(
            f"none of {found.tried} recipes fits {format_bytes(found.limit.size_bytes)}. Run `ligerprof advise`."
        )


def _fit_plan(recipe: TrainingRecipe, *, simulate: bool, as_json: bool) -> None:
    from ligerprof.library import plan
    from ligerprof.reports.search import render_plan

    with stages() as progress:
        found = plan(recipe, simulate=simulate, progress=progress, processes=_processes())
    show(found.to_json, lambda: render_plan(found), as_json=as_json)


def _known(answer: Any) -> Any:
    """The verdict on the wanted pair, left open where files do not say what they train."""
    return answer if knows_method() else replace(answer, answer=None)


def _teller(recipe: TrainingRecipe, progress: Stages) -> "Answered":
    """Prints each answer when it is known, the first one below the recipe and its limit."""
    from rich.text import Text

    from ligerprof.reports.search import answer_line, heading

    def tell(name: str, answer: "Verdict | Point | None") -> None:
        with progress.aside():
            if name == "wanted":
                answer = _known(answer)
                print_text(heading(recipe.summary, find_limit(recipe)))
            print_text(Text(answer_line(recipe, name, answer)))

    return tell


def _processes() -> int:
    """How many processes simulate at the same time; 0 if this one has imported torch, or there is one core.

    Also 0 on macOS, which lacks the function and where a process that has imported torch must not fork.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return 0 if "torch" in sys.modules or cores == 1 else min(cores, _MOST_PROCESSES)
