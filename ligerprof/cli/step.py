"""`ligerprof step`: one profiled training step and its run directory."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ligerprof.cli import interrupts
from ligerprof.cli.common_options import folder_option, force_option, json_option, trace_option
from ligerprof.cli.options import RecipeCommand, recipe_options
from ligerprof.cli.output import say, show
from ligerprof.errors import DoesNotFitError, MissingDependencyError, OutputError
from ligerprof.recipe.categories import Engine
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Backend
from ligerprof.snapshots.collector import collector_paused
from ligerprof.units import format_bytes

if TYPE_CHECKING:
    from ligerprof.runs.measured.ranks import Rank


@click.command(cls=RecipeCommand, name="step")
@recipe_options
@folder_option("The run directory. Default: the next number under runs/.")
@trace_option(default=True)
@force_option
@json_option
@click.pass_context
def command(
    ctx: click.Context, recipe: TrainingRecipe, output: Path | None, trace: bool, force: bool, as_json: bool
) -> None:
    """Run one profiled training step, on the GPU or simulated.

    Without a CUDA device the real model code runs on a simulated GPU;
    all output is then marked as simulated.
    """
    from ligerprof.reports.page.run import render_page
    from ligerprof.reports.step import render_step, write_summaries
    from ligerprof.runs.directory import REPORT, create_run_directory
    from ligerprof.runs.measured.ranks import rank_from_environment
    from ligerprof.runs.step import choose_backend, require_runnable, run_step

    # torch is imported here
    with collector_paused():
        require_runnable(recipe, command="step")
    if choose_backend(recipe) is Backend.SIMULATED:
        # a measured step runs with the collector, as training does
        ctx.find_root().with_resource(collector_paused())
    rank = None if recipe.engine is Engine.TORCH else rank_from_environment()
    if rank is not None and rank.rank > 0:
        fits = _follow(recipe, rank, trace)
    else:
        run = create_run_directory(output, force=force)
        for clean_up in (ctx.call_on_close, interrupts.at_end):
            clean_up(run.remove_if_empty)
        report = run_step(recipe, run, say, trace=trace)
        say("writing the report")
        run.write_text(REPORT, render_page(report))
        try:
            write_summaries(report)
        except (MissingDependencyError, OutputError) as error:
            say(f"note: {error}")
        show(report.to_json, lambda: render_step(report), as_json=as_json)
        fits = report.fits is not False
    if not fits:
        ctx.exit(DoesNotFitError.exit_code)


def _follow(recipe: TrainingRecipe, rank: "Rank", trace: bool) -> bool:
    """Train as a launcher's rank other than 0, which writes the run directory; False if out of memory.

    The launcher stops the other ranks when this one exits with an error code.
    """
    from ligerprof.runs.measured.ranks import follow_step

    outcome = follow_step(recipe, trace=trace)
    if outcome.oom is None:
        say(f"rank {rank.rank}: peak {format_bytes(outcome.peak_bytes)}; rank 0 writes the result")
        return True
    limit = format_bytes(outcome.oom.limit_bytes)
    say(f"rank {rank.rank}: out of memory in {outcome.oom.phase.value} of step {outcome.oom.step}, limit {limit}")
    return False
