"""Run a mixture of experts one after another with given numbers of tokens, which fake tensors cannot tell."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ligerprof.recipe.routing import tokens_per_expert
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.simulated.recorder import StorageRecorder

_EAGER = "eager"


@contextmanager
def routed_experts(recipe: TrainingRecipe, recorder: StorageRecorder) -> Iterator[None]:
    """Let each mixture of experts find the tokens of the recipe's routing, if its experts run in turn.

    transformers calls what is registered for the implementation, here a function that calls the class's own forward.
    """
    if not recipe.runs_experts_in_turn:
        yield
        return
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    # modules are called in the order of their layers first; recomputations follow in another order
    layers: dict[int, int] = {}

    def run(module: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        counts = tokens_per_expert(
            recipe.routing,
            layers.setdefault(id(module), len(layers)),
            tokens=hidden_states.shape[:-1].numel(),
            experts=recipe.spec.experts,
            chosen=recipe.spec.chosen_experts,
        )
        hit = [count for count in counts if count]
        with recorder.finding(iter((len(hit), *hit))):
            return type(module).forward.__wrapped__(module, hidden_states, *args, **kwargs)

    ALL_EXPERTS_FUNCTIONS[_EAGER] = run
    try:
        yield
    finally:
        ALL_EXPERTS_FUNCTIONS.pop(_EAGER)
