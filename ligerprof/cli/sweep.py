"""`ligerprof sweep`: run a grid of training steps, each in its own process."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ligerprof.cli import common_options as common
from ligerprof.cli.options import RecipeCommand, grid_options
from ligerprof.cli.output import say, show
from ligerprof.errors import LigerprofError
from ligerprof.recipe.categories import Axis

if TYPE_CHECKING:
    from ligerprof.runs.sweep.cells import Grid, SweepFolder
    from ligerprof.runs.sweep.runner import SweepPlan, SweepResult, Watcher


@click.command(cls=RecipeCommand, name="sweep")
@grid_options
@common.folder_option("The sweep's folder; finished cells in it are not run again.", Path("runs/sweep"))
@common.word_option(
    "--find-limit", Axis, "Also search the largest batch or sequence that runs, with all other options fixed."
)
@common.timeout_option
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    default=1,
    show_default=True,
    help="Simulated cells to run at once.",
)
@click.option("--stop-at-oom", is_flag=True, help="Skip sizes above one that was out of memory.")
@click.option("--skip-invalid", is_flag=True, help="Skip combinations that cannot be trained.")
@click.option("--force", is_flag=True, help="Run finished cells again; their new rows replace the old ones.")
@common.dry_run_option
@common.trace_option(default=False)
@common.json_option
def command(grid: "Grid", output: Path, dry_run: bool, as_json: bool, **how: Any) -> None:
    """Run a grid of training steps; out of memory is a result.

    Every recipe option takes several values, joined by commas; kernels of one cell are joined by '+'. Each
    combination runs in its own process and adds one line to results.jsonl. A sweep that was stopped or killed
    continues when it is started again.
    """
    from ligerprof.runs.sweep.cells import SweepFolder
    from ligerprof.runs.sweep.runner import SweepSettings, make_plan, on_this_machine, run_sweep

    here = on_this_machine(grid)
    searches = ((how["find_limit"], here),) if how["find_limit"] else ()
    plan = make_plan((here,), searches=searches, skip_invalid=how["skip_invalid"])
    folder = SweepFolder(path=output)
    if dry_run:
        print_plan(plan, folder, as_json=as_json)
        return
    settings = SweepSettings(
        timeout_seconds=how["timeout"],
        trace=how["trace"],
        jobs=how["jobs"],
        stop_at_oom=how["stop_at_oom"],
        again=how["force"],
    )
    with watching(plan) as watcher:
        result = run_sweep(plan, folder, settings, watcher)
    if result.cells and not watcher.expected_count:
        say(f"{len(result.cells)} of {len(result.cells)} cells were done before")
    print_result(result, as_json=as_json)


def print_plan(plan: "SweepPlan", folder: "SweepFolder", *, as_json: bool) -> None:
    """Print the cells that would run, each with its estimated peak."""
    from ligerprof.reports.sweep import plan_json, plan_table

    cells = folder.read()
    show(lambda: plan_json(plan, cells), lambda: plan_table(plan, cells), as_json=as_json)
    for refusal in () if as_json else plan.refusals:
        say(f"left out: {refusal.reason}")


@contextmanager
def watching(plan: "SweepPlan") -> "Iterator[Watcher]":
    """Show the progress on stderr: a bar in a terminal, otherwise one line per cell."""
    from ligerprof.reports.sweep import BarWatcher, PlainWatcher, progress_bar
    from ligerprof.runs.sweep.cells import distinguishing_options

    distinguishing = distinguishing_options(plan.recipes)
    if sys.stderr.isatty():
        with progress_bar() as progress:
            yield BarWatcher(progress, distinguishing)
    else:
        yield PlainWatcher(say, distinguishing)


def print_result(result: "SweepResult", *, as_json: bool) -> None:
    """Print the cells and the borders, then raise LigerprofError if cells failed for another reason than memory."""
    from ligerprof.reports.sweep import render_sweep
    from ligerprof.runs.sweep.cells import CellStatus

    show(result.to_json, lambda: render_sweep(result), as_json=as_json)
    if failed := result.count(CellStatus.FAILED):
        raise LigerprofError(
            f"{failed} of {len(result.cells)} cells failed. The reasons are above and in {result.folder.results}; "
            "the same command tries them again."
        )
