"""`ligerprof estimate`: the analytic estimate of a training step's memory, optionally with the simulated step."""

from typing import TYPE_CHECKING, Any, NoReturn

import click

from ligerprof.analyzers.estimate import MemoryEstimate, estimate
from ligerprof.cli.common_options import json_option
from ligerprof.cli.options import RecipeCommand, recipe_options
from ligerprof.cli.output import print_json, say
from ligerprof.errors import DoesNotFitError
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.reports.estimate import fits_limit, layers_table, render_estimate
from ligerprof.units import format_bytes

if TYPE_CHECKING:
    from ligerprof.analyzers.explain.peak import PeakReport
    from ligerprof.runs.outcome import StepOutcome

_SIMULATED = "simulated"


@click.command(cls=RecipeCommand, name="estimate", short_help="Predict the peak analytically, in milliseconds.")
@recipe_options
@click.option(
    "--by",
    type=click.Choice(("role", "layer")),
    default="role",
    show_default=True,
    help="Break the peak down by role, or also by part of the model.",
)
@click.option("--simulate", is_flag=True, help="Also simulate the step and compare.")
@json_option
def command(recipe: TrainingRecipe, by: str, simulate: bool, as_json: bool) -> None:
    """Predict the peak of a training step analytically, in milliseconds and without torch.

    With --memory-limit the exit code is 3 if the prediction is over the limit.
    """
    estimated = estimate(recipe)
    simulated = _simulate(recipe) if simulate else None
    if as_json:
        print_json(_to_json(estimated, simulated))
    else:
        _print(recipe, estimated, simulated)
        if by == "layer":
            _print_layers(estimated)
    if not fits_limit(recipe, estimated):
        _refuse(recipe, estimated)


def _refuse(recipe: TrainingRecipe, estimated: MemoryEstimate) -> NoReturn:
    needed = format_bytes(max(estimated.peak_bytes, estimated.first_step_peak_bytes))
    limit = format_bytes(recipe.memory_limit_bytes or 0)
    raise DoesNotFitError(f"the estimate of {needed} is over --memory-limit {limit}.")


def _simulate(recipe: TrainingRecipe) -> "tuple[StepOutcome, PeakReport]":
    say("simulating the step")
    from ligerprof.analyzers.explain.analysis import explain
    from ligerprof.runs.simulated import simulate_step
    from ligerprof.snapshots.reader import Snapshot

    outcome = simulate_step(recipe, record=True)
    return outcome, explain(Snapshot.from_dict(outcome.snapshot), step=outcome.profiled_step)


def _to_json(estimated: MemoryEstimate, simulated: "tuple[StepOutcome, PeakReport] | None") -> dict[str, Any]:
    if simulated is None:
        return estimated.to_json()
    outcome, peak = simulated
    return {
        **estimated.to_json(),
        _SIMULATED: {
            "peak_bytes": outcome.peak_bytes,
            "reserved_bytes": outcome.reserved_bytes,
            "first_step_peak_bytes": outcome.first_step_peak_bytes,
            "phases": {phase.value: size_bytes for phase, size_bytes in outcome.phases.items()},
            "roles": peak.roles.to_json(),
        },
        "error_ratio": estimated.peak_bytes / outcome.peak_bytes - 1,
    }


def _print_layers(estimated: MemoryEstimate) -> None:
    from ligerprof.reports.terminal import console

    console().print(layers_table(estimated))


def _print(
    recipe: TrainingRecipe, estimated: MemoryEstimate, simulated: "tuple[StepOutcome, PeakReport] | None"
) -> None:
    from ligerprof.reports.terminal import FiguresColumn, console

    column = None
    if simulated is not None:
        outcome, peak = simulated
        column = FiguresColumn(title=_SIMULATED, roles=peak.roles, phases=outcome.phases, peak_bytes=outcome.peak_bytes)
    console().print(render_estimate(recipe, estimated, column))
