"""`ligerprof advise`: the cheapest changes that bring a recipe below a limit, each with its saving and cost."""

import click

from ligerprof.analyzers.search.advise import Advice, advise
from ligerprof.cli.checking import make_judge, simulate_option
from ligerprof.cli.common_options import json_option
from ligerprof.cli.options import RecipeCommand, recipe_options
from ligerprof.cli.output import show
from ligerprof.errors import DoesNotFitError, UnsupportedError
from ligerprof.recipe.conflicts import require_supported
from ligerprof.recipe.flags import command_line
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.reports.advise import render_advice
from ligerprof.units import format_bytes


@click.command(cls=RecipeCommand, name="advise", short_help="List the cheapest changes that make a recipe fit.")
@recipe_options
@simulate_option
@json_option
def command(recipe: TrainingRecipe, simulate: bool, as_json: bool) -> None:
    """Suggest changes so that a recipe fits --memory-limit, or the memory of --gpu less the CUDA context.

    Tries a ladder of changes, the cheapest first, until the recipe fits. Prints the estimated saving and
    the cost of each, and the command to run next. The exit code is 3 if the whole ladder does not suffice.
    """
    judge = make_judge(recipe, simulate=simulate)
    advice = advise(recipe, judge)
    next_command = command_line(_runnable(advice), advice.plan)
    show(
        lambda: {**advice.to_json(), "command": next_command, "notes": list(advice.notes)},
        lambda: render_advice(advice, next_command),
        as_json=as_json,
    )
    if not advice.plan_verdict.fits:
        raise DoesNotFitError(
            f"no change of the ladder makes it fit {format_bytes(advice.limit.size_bytes)}."
            " Choose another GPU, a shorter sequence or a smaller model."
        )


def _runnable(advice: Advice) -> str:
    """The command to run next: `step` if this version supports the plan, else `estimate`."""
    try:
        require_supported(advice.plan, command="step")
    except UnsupportedError:
        return "estimate"
    return "step"
