"""How fit and advise check recipes: by a simulated step, or with --no-simulate by the analytic estimate alone."""

import click

from ligerprof.analyzers.search.budget import Check, Judge, Reserved, find_limit
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
    """The judge of a recipe's limit.

    Raises:
        RecipeError: the limit is above the GPU's memory.
    """
    check: Check | None = _simulated if simulate else None
    return Judge(find_limit(recipe), check)


def _simulated(recipe: TrainingRecipe) -> Reserved:
    # before torch is imported, and before anything is announced
    require_supported(recipe, command="simulate")
    say(f"simulating {recipe.summary}{f', {recipe.alloc_conf}' if recipe.alloc_conf else ''}")
    from ligerprof.runs.simulated import simulate_step

    outcome = simulate_step(recipe, record=False)
    return Reserved(
        first_bytes=outcome.first_step_reserved_bytes,
        steady_bytes=outcome.reserved_bytes,
        fits=outcome.oom is None,
    )
