"""`ligerprof estimate`: the analytic estimate of a training step's memory, optionally with the simulated step."""

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from ligerprof.cli.common_options import json_option, markdown_option, word_option
from ligerprof.cli.options import TRAINING_COMMAND, RecipeCommand, recipe_options, was_given
from ligerprof.cli.output import config_report, knows_method, print_markdown, say, show
from ligerprof.errors import DoesNotFitError
from ligerprof.recipe.conflicts import require_packages, require_supported
from ligerprof.recipe.lengths import at_longest
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import View
from ligerprof.serialization import select
from ligerprof.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from ligerprof.analyzers.estimate import FitVerdict, MemoryEstimate
    from ligerprof.reports.terminal import FiguresColumn
    from ligerprof.runs.whole_run.replay import WholeRun


@click.command(cls=RecipeCommand, name="estimate", context_settings={"allow_interspersed_args": False})
@recipe_options
@word_option(
    "--by", (View.ROLE, View.LAYER), "Break the peak down by role, or also by part of the model.", default=View.ROLE
)
@click.option("--simulate", is_flag=True, help="Also simulate the step and compare; with --lengths also the whole run.")
@markdown_option
@json_option
@click.argument(TRAINING_COMMAND, metavar="[-- COMMAND]", nargs=-1, type=click.UNPROCESSED)
def command(recipe: TrainingRecipe, by: View, *, simulate: bool, as_markdown: bool, as_json: bool) -> None:
    """Predict the peak of a training step analytically, in milliseconds and without torch.

    COMMAND is a training command (trl sft ..., python train.py ..., accelerate launch ..., torchrun ..., deepspeed
    ..., llamafactory-cli train ..., axolotl train ...), a line of a shell in quotes, or a shell script. It is read as
    a --config file is, and nothing is run.

    With --memory-limit or --gpu the exit code is 3 if the run does not fit: what it allocates and frees is replayed
    through a model of torch's allocator. It is 0 where it may not fit, which a simulated step settles. With
    --host-memory it is 3 also if what it keeps in main memory is over that.
    A --config file that does not say what it trains is counted as supervised fine-tuning, without a verdict.
    """
    from ligerprof.analyzers.estimate import Answer, estimate, judge, judged, require_host_memory
    from ligerprof.analyzers.step_time.account import time_or_reason
    from ligerprof.analyzers.step_time.rates import time_json
    from ligerprof.reports.estimate import layers_table, render_estimate
    from ligerprof.runs.tapes.traced import with_tape

    if as_markdown and (simulate or by is View.LAYER):
        raise click.UsageError("--format markdown shows the estimate alone: leave --simulate and --by out.")
    # a simulation runs the model's own code, and needs no tape
    given, recipe = recipe, with_tape(recipe, say)
    estimated = estimate(recipe)
    if knows_method():
        estimated = judged(estimated, by_gpu=was_given("gpu"))
    else:
        # whether another method than the counted one fits is not known
        estimated = dataclasses.replace(estimated, gpu=None, host=None)
    longest = at_longest(recipe)
    # first, because it covers fewer recipes
    whole_run = _simulate_run(given) if simulate and recipe.lengths is not None else None
    simulated, column, completes = _simulate(at_longest(given)) if simulate else ({}, None, True)
    if simulate and estimated.gpu is not None:
        completes = completes if whole_run is None else whole_run.oom is None
        answer = judge(estimated.gpu.limit_bytes, lambda _limit: completes)
        estimated = dataclasses.replace(estimated, gpu=dataclasses.replace(estimated.gpu, answer=answer))
    if simulated:
        simulated["error_ratio"] = estimated.peak_bytes / simulated["simulated"]["peak_bytes"] - 1
    if as_markdown and not as_json:
        # it also renders recordings, which takes numpy
        from ligerprof.reports.markdown import estimate_markdown

        print_markdown(estimate_markdown(_with_config(estimated)))
    else:
        time = time_or_reason(recipe)
        run_json: dict[str, Any] = {} if whole_run is None else {"whole_run": whole_run.to_json()}
        show(
            lambda: {**_with_config(estimated).to_json(), **time_json(time), **simulated, **run_json},
            lambda: render_estimate(longest, _with_config(estimated), column, time),
            as_json=as_json,
        )
    if not (as_json or as_markdown):
        _print_more(layers_table(estimated) if by is View.LAYER else None, whole_run)
    if whole_run is not None and whole_run.oom is not None:
        raise DoesNotFitError(f"the run does not fit: memory runs out in step {whole_run.oom.moment.step:,}.")
    if estimated.gpu is not None and estimated.gpu.answer is Answer.DOES_NOT_FIT:
        raise DoesNotFitError(_reason(estimated, estimated.gpu, simulate=simulate))
    if knows_method():
        require_host_memory(recipe)


def _reason(estimated: "MemoryEstimate", verdict: "FitVerdict", *, simulate: bool) -> str:
    from ligerprof.analyzers.estimate import Moment

    limit = f"{format_bytes(verdict.limit_bytes)} ({verdict.limit_source})"
    if simulate:
        return f"the simulated step runs out of memory under {limit}."
    if verdict.allocated_fits:
        return f"the estimate of {format_bytes(estimated.reserved_bytes)} reserved is more than {limit}."
    moment = "" if verdict.decided_by is Moment.STEADY else f" for the {verdict.decided_by}"
    return f"the estimate of {format_bytes(verdict.allocated_bytes)}{moment} is more than {limit}."


def _with_config(estimated: "MemoryEstimate") -> "MemoryEstimate":
    """The estimate with what --config files made it assume and leave out."""
    report = config_report()
    if report is None:
        return estimated
    return dataclasses.replace(
        estimated, assumed=(*estimated.assumed, *report.assumed), left_out=(*estimated.left_out, *report.omissions)
    )


def _simulate_run(recipe: TrainingRecipe) -> "WholeRun":
    from ligerprof.runs.whole_run.simulate import simulate_run

    return simulate_run(recipe, say)


def _print_more(layers: "Table | None", run: "WholeRun | None") -> None:
    from rich.text import Text

    from ligerprof.reports.estimate import run_lines
    from ligerprof.reports.terminal import console

    for part in (*([] if layers is None else [layers]), *map(Text, [] if run is None else run_lines(run))):
        console().print(part)


def _simulate(recipe: TrainingRecipe) -> "tuple[dict[str, Any], FiguresColumn, bool]":
    """Simulate the step; returns its figures for JSON and as a column of the tables, and whether memory sufficed."""
    from ligerprof.reports.terminal import FiguresColumn

    require_supported(recipe, command="estimate --simulate", simulated=True)
    require_packages(recipe, command="estimate --simulate", simulated=True)
    say("simulating the step")
    from ligerprof.analyzers.explain.analysis import explain
    from ligerprof.runs.simulated import simulate_step
    from ligerprof.snapshots.reader import Snapshot

    outcome = simulate_step(recipe, repeat=False)
    peak = explain(Snapshot.from_dict(outcome.snapshot), step=outcome.profiled_step)
    sizes = select(outcome, "peak_bytes", "reserved_bytes", "first_step_peak_bytes", "phases")
    column = FiguresColumn(title="simulated", roles=peak.roles, phases=outcome.phases, peak_bytes=outcome.peak_bytes)
    return {"simulated": {**sizes, "roles": peak.roles.to_json()}}, column, outcome.oom is None
