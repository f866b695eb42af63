"""The range of a step's peak over the ways in which tokens choose experts."""

from collections.abc import Callable
from dataclasses import replace

from ligerprof.analyzers.estimate.result import RoutingRange
from ligerprof.recipe.categories import ExpertsImplementation
from ligerprof.recipe.routing import UNIFORM, WORST
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.units import format_bytes


def routing_range(
    recipe: TrainingRecipe, peak_bytes: int, peak_of: Callable[[TrainingRecipe], int]
) -> RoutingRange | None:
    """The range of a recipe whose own routing has this peak, by the peaks of others; None without experts."""
    if not recipe.spec.experts:
        return None
    if not recipe.runs_experts_in_turn:
        return RoutingRange(
            implementation=None if _multiplies_all(recipe) else ExpertsImplementation.GROUPED_MM.value,
            depends=False,
            uniform_bytes=peak_bytes,
            worst_bytes=peak_bytes,
        )

    def peak(routing: str) -> int:
        if routing == recipe.routing:
            return peak_bytes
        return peak_of(replace(recipe, routing=routing))

    return RoutingRange(
        implementation=ExpertsImplementation.EAGER.value,
        depends=True,
        uniform_bytes=peak(UNIFORM),
        worst_bytes=peak(WORST),
    )


def _multiplies_all(recipe: TrainingRecipe) -> bool:
    row = recipe.spec.architecture.mlp.experts
    return row is not None and row.multiplies_all


def routing_assumption(recipe: TrainingRecipe, found: RoutingRange | None) -> tuple[str, ...]:
    """What the estimate assumes of the routing: one sentence, or none without experts."""
    if found is None:
        return ()
    if found.implementation is None:
        return ("every expert multiplies all tokens, whatever the routing",)
    if not found.depends:
        return ("experts run as grouped products (grouped_mm), whose sizes do not depend on the routing",)
    chosen = f"--routing {recipe.routing}" if recipe.routing in (UNIFORM, WORST) else "the routing of a file"
    sentence = (
        f"experts run one after another (eager), with {chosen}: {format_bytes(found.uniform_bytes)} if tokens choose"
        f" evenly, {format_bytes(found.worst_bytes)} if all choose the same experts"
    )
    return (sentence,)
