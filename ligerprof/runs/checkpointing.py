"""Activation checkpointing of a transformers model as a recipe asks for it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ligerprof.errors import RecipeError
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.torch_memory.saved_tensors import SavePolicy, Selection, find_policy


def enable_checkpointing(model: Any, recipe: TrainingRecipe) -> None:
    """Checkpoint the recipe's decoder layers.

    Versions of transformers before 5.23 do not have `every_n_layers`, so the layers are switched off one by one.
    """
    settings: dict[str, Any] = {"use_reentrant": recipe.reentrant}
    if recipe.selective is not None:
        settings["context_fn"] = selective_contexts(find_policy(recipe.selective))
    # transformers 5.2x renamed the method, and warns if the older name is called
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
    for index, layer in enumerate(checkpointed_layers(model)):
        layer.gradient_checkpointing = recipe.checkpoints_layer(index)


def selective_contexts(policy: SavePolicy) -> Callable[[], Any]:
    """What torch.utils.checkpoint takes as `context_fn`.

    Raises:
        RecipeError: torch does not have an operator.
    """
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    for name in policy.every:
        _require_operator(name)

    def contexts() -> Any:
        # versions of torch before 2.13 ask again while they recompute
        passes = {False: Selection(policy), True: Selection(policy)}

        def choose(context: Any, operator: Any, *args: Any, **_kwargs: Any) -> CheckpointPolicy:
            factor = tuple(args[1].shape) if operator is torch.ops.aten.mm.default else None
            kept = passes[context.is_recompute].keeps(str(operator), factor)
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(choose)  # type: ignore[no-untyped-call]

    return contexts


def _require_operator(name: str) -> None:
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        raise RecipeError(f"--selective: torch {torch.__version__} has no operator {name}. Correct its name.")


def checkpointed_layers(model: nn.Module) -> list[Any]:
    """The layers that gradient checkpointing runs again, in the order of the model's modules."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
