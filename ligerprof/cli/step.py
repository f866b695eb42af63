"""`ligerprof step`: one profiled training step and the run directory it leaves."""

from pathlib import Path

import click

from ligerprof.cli.common_options import folder_option, force_option, json_option, trace_option
from ligerprof.cli.options import RecipeCommand, recipe_options
from ligerprof.cli.output import print_json, say
from ligerprof.errors import MissingDependencyError
from ligerprof.recipe.categories import Engine
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.measured.deepspeed.ranks import Rank, rank_from_environment
from ligerprof.units import format_bytes

_OUT_OF_MEMORY = 3


@click.command(cls=RecipeCommand, name="step", short_help="Run one profiled training step, on the GPU or simulated.")
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

    Where there is no CUDA device the real model code runs on fake tensors through a model of
    the caching allocator, and everything says that it is simulated.
    """
    if recipe.engine is Engine.DEEPSPEED and (rank := rank_from_environment()) is not None and rank.rank > 0:
        _follow(ctx, recipe, rank, trace)
        return
    from ligerprof.reports.page.run import render_page
    from ligerprof.reports.step import render_step
    from ligerprof.reports.tensorboard import write_summaries
    from ligerprof.reports.terminal import console
    from ligerprof.runs.directory import REPORT, create_run_directory
    from ligerprof.runs.step import run_step

    run = create_run_directory(output, force=force)
    report = run_step(recipe, run, say, trace=trace)
    say("writing the report")
    run.write_text(REPORT, render_page(report))
    try:
        write_summaries(report)
    except MissingDependencyError as error:
        say(f"note: {error}")
    if as_json:
        print_json(report.to_json())
    else:
        console().print(render_step(report))
    if report.outcome.oom is not None:
        ctx.exit(_OUT_OF_MEMORY)


def _follow(ctx: click.Context, recipe: TrainingRecipe, rank: Rank, trace: bool) -> None:
    """Train as a launcher's rank beside rank 0, which writes the run directory."""
    from ligerprof.runs.measured.deepspeed.measure import follow_step

    outcome = follow_step(recipe, trace=trace)
    if outcome.oom is None:
        say(f"rank {rank.rank}: peak {format_bytes(outcome.peak_bytes)}; rank 0 writes the result")
        return
    limit = format_bytes(outcome.oom.limit_bytes)
    say(f"rank {rank.rank}: out of memory in {outcome.oom.phase.value} of step {outcome.oom.step}, limit {limit}")
    # the launcher ends the other ranks when it sees the exit code
    ctx.exit(_OUT_OF_MEMORY)
