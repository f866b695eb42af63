"""Train a recipe's model under DistributedDataParallel."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ligerprof.recipe.categories import GradSync
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.parallel.process_group import join_process_group
from ligerprof.runs.training import Trainer, built_model, make_optimizer, make_scaler


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicatedTrainer(Trainer):
    """Training under DDP."""

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Reduce gradients in this micro-batch, or only accumulate them, as `no_sync` does."""
        model: Any = self.model
        model.require_backward_grad_sync = is_last or self.recipe.grad_sync is GradSync.EVERY


@contextmanager
def ddp_trainer(
    recipe: TrainingRecipe, device: torch.device, see_model: Callable[[nn.Module], None]
) -> Iterator[ReplicatedTrainer]:
    """Build model and optimizer under DDP, as the rank that the environment variables give.

    Args:
        device: this rank's GPU; the CPU trains over gloo.
        see_model: called with the model before DDP wraps it.

    Raises:
        LigerprofError: as `built_model`.
    """
    join_process_group(recipe, device)
    with built_model(recipe, device) as model:
        see_model(model)
        yield make_replicated_trainer(recipe, model, device)


def make_replicated_trainer(recipe: TrainingRecipe, model: nn.Module, device: torch.device) -> ReplicatedTrainer:
    """A trainer of a built model, with its DDP wrapper, optimizer and loss scaler."""
    replica = nn.parallel.DistributedDataParallel(
        model,
        device_ids=None if device.type == "cpu" else [device.index],
        gradient_as_bucket_view=recipe.bucket_view,
    )
    return ReplicatedTrainer(
        recipe=recipe,
        model=replica,
        optimizer=make_optimizer(recipe, model),
        scaler=make_scaler(recipe, device.type),
        device_type=device.type,
    )
