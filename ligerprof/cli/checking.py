"""The judge of fit and advise: a simulated step, or with --no-simulate only the analytic estimate."""

import click

from ligerprof.analyzers.search.budget import Judge, Reserved, find_limit
from ligerprof.cli.output import say
from ligerprof.recipe.conflicts import require_supported
from ligerprof.recipe.training import TrainingRecipe

simulate_option = click.option(
    "--simulate/--no-simulate",
    default=True,
    show_default=True,
    help="Check answers by simulated steps (seconds each), or use only the analytic estimate.",
)


def make_judge(recipe: TrainingRecipe, *, simulate: bool) -> Judge:
    """The judge of a recipe's limit; raises RecipeError if the limit is above the GPU's memory."""
    return Judge(find_limit(recipe), _simulated if simulate else None)


def _simulated(recipe: TrainingRecipe) -> Reserved:
    # before the message and the import of torch
    require_supported(recipe, command="simulate", simulated=True)
    say(f"simulating {recipe.summary}{f', {recipe.alloc_conf}' if recipe.alloc_conf else ''}")
    from ligerprof.runs.simulated import simulate_step

    outcome = simulate_step(recipe, record=False)
    return Reserved(
        first_bytes=outcome.first_step_reserved_bytes,
        steady_bytes=outcome.reserved_bytes,
        fits=outcome.oom is None,
    )
