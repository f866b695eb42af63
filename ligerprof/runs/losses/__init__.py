"""Losses over the vocabulary in place of the model's own: those of older transformers, TRL, torch and torchtitan."""

from collections.abc import Callable
from typing import Any

from ligerprof.recipe.categories import Loss
from ligerprof.recipe.training import TrainingRecipe

__all__ = ["install_loss"]


def install_loss(model: Any, recipe: TrainingRecipe) -> None:
    """Give a transformers model the forward of the recipe's loss, before adapters and engines wrap it.

    Raises:
        MissingDependencyError: the installed torch does not have the loss.
    """
    if recipe.loss is not Loss.HF:
        decoder = recipe.spec.architecture.final_norm.rpartition(".")[0] if model.base_model is model else None
        _replace_forward(model, _forward_of(recipe), decoder)


def _forward_of(recipe: TrainingRecipe) -> Callable[..., Any]:
    if recipe.loss is Loss.HF_4_45:
        from ligerprof.runs.losses import legacy

        return legacy.forward
    if recipe.loss is Loss.CHUNKED_NLL:
        from ligerprof.runs.losses import chunked_nll

        return chunked_nll.make_forward(recipe.labelled_tokens, _evaluated_tokens(recipe))
    if recipe.loss is Loss.TRL_TILED:
        from ligerprof.runs.losses import trl_tiled

        return trl_tiled.make_forward(recipe.labelled_tokens, _evaluated_tokens(recipe))
    if recipe.loss is Loss.TORCH_LINEAR:
        from ligerprof.runs.losses import torch_linear

        return torch_linear.make_forward()
    from ligerprof.runs.losses import titan_chunked

    return titan_chunked.make_forward(recipe.labelled_tokens, recipe.grad_accum)


def _evaluated_tokens(recipe: TrainingRecipe) -> int:
    """Labelled tokens of an evaluation batch, 0 without evaluation."""
    return 0 if recipe.evaluation is None else recipe.evaluation.labelled_tokens


def _replace_forward(model: Any, forward: Callable[..., Any], decoder: str | None) -> None:
    """Replace the model's forward through a subclass, so that wrappers and other patches see an ordinary method.

    Args:
        decoder: the decoder's name if the model, as Llama 4's text model, does not know it.
    """
    modern = type(model)
    body: dict[str, Any] = {"forward": forward, "__module__": modern.__module__, "__qualname__": modern.__qualname__}
    if decoder is not None:
        body["base_model"] = property(lambda self: self.get_submodule(decoder))
    model.__class__ = type(modern.__name__, (modern,), body)
