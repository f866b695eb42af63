"""The groups of modules whose weights FSDP2 gathers together."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ligerprof.recipe.categories import Wrap
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.checkpointing import checkpointed_layers


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Modules that one call of fully_shard takes.

    Attributes:
        reshard: reshard_after_forward; None is torch's default, which keeps the root gathered.
    """

    modules: tuple[nn.Module, ...]
    reshard: bool | None


def module_groups(model: nn.Module, recipe: TrainingRecipe) -> tuple[Group, ...]:
    """The groups of a recipe's model in the order in which they are sharded, the model itself last."""
    layers = [Group(modules=(layer,), reshard=recipe.reshard) for layer in checkpointed_layers(model)]
    if recipe.wrap is Wrap.LAYERS:
        return (*layers, Group(modules=(model,), reshard=recipe.reshard))
    return (*layers, *_accelerate_groups(model, recipe), Group(modules=(model,), reshard=None))


def _accelerate_groups(model: Any, recipe: TrainingRecipe) -> Iterator[Group]:
    """The embedding, and the final norm with the head; a tied embedding is in the second group.

    As in fsdp2_prepare_model of accelerate 1.15 (accelerate/utils/fsdp_utils.py).
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = embedding.weight is head.weight
    if not tied:
        yield Group(modules=(embedding,), reshard=recipe.reshard)
    tail = (_final_norm(model), embedding if tied else None, head)
    yield Group(modules=tuple(module for module in tail if module is not None), reshard=False)


def _final_norm(model: Any) -> nn.Module | None:
    """The last direct child of the base model with `Norm` in its class name."""
    base = getattr(model, model.base_model_prefix, None) if model.base_model_prefix else model
    if not isinstance(base, nn.Module):
        return None
    norms = [module for module in base.children() if "Norm" in type(module).__name__]
    return norms[-1] if norms else None
