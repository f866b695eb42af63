"""Build a recipe's model under its engine on fake tensors, as one rank of those that train together."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ligerprof.recipe.categories import Engine, Offload
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.parallel.ddp import make_replicated_trainer
from ligerprof.runs.parallel.fsdp2 import ShardedTrainer, fill_shards, make_mesh, make_sharded_trainer, shard
from ligerprof.runs.simulated.device import SimulatedDevice
from ligerprof.runs.simulated.patches import labels_in_range, providers_take_cpu_for_cuda
from ligerprof.runs.simulated.ranks import one_rank, sharding_on
from ligerprof.runs.simulated.recorder import StorageRecorder
from ligerprof.runs.simulated.reducer import ddp_in_python
from ligerprof.runs.simulated.zero import deepspeed_on, make_partitioned_trainer, offloading
from ligerprof.runs.training import Trainer, Training, built_model, make_trainer

# fake CPU tensors in place of GPU tensors
STAND_IN = torch.device("cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class _OffloadedTrainer(ShardedTrainer):
    """Training whose optimizer runs in main memory."""

    recorder: StorageRecorder

    def update(self) -> None:
        """Clip the gradients and step the optimizer on the host."""
        with self.recorder.on_host():
            super(_OffloadedTrainer, self).update()


@contextmanager
def joined_group(
    recipe: TrainingRecipe, rank: int, device: SimulatedDevice, recorder: StorageRecorder
) -> Iterator[DeviceMesh | None]:
    """Be one rank of the recipe's GPUs, and return the mesh of FSDP2; enter it outside of fake tensors.

    Raises:
        UnsupportedError: this process is part of a process group already.
    """
    if recipe.engine is Engine.TORCH:
        yield None
        return
    if recipe.engine is Engine.DEEPSPEED:
        with one_rank(rank, recipe.gpus), deepspeed_on(device, recorder, recipe, rank):
            yield None
        return
    with one_rank(rank, recipe.gpus), sharding_on(device, recorder), ddp_in_python():
        yield make_mesh(recipe, STAND_IN.type) if recipe.engine is Engine.FSDP2 else None


@contextmanager
def built_trainer(
    recipe: TrainingRecipe,
    mesh: DeviceMesh | None,
    recorder: StorageRecorder,
    see_model: Callable[[nn.Module], None],
) -> Iterator[Training]:
    """Build model and optimizer.

    Args:
        see_model: called with the model before anything wraps it.

    Raises:
        LigerprofError: as `built_model`.
    """
    with (
        built_model(recipe, STAND_IN, on_meta=mesh is not None) as model,
        providers_take_cpu_for_cuda(),
        labels_in_range(recorder),
    ):
        see_model(model)
        if mesh is not None:
            yield _sharded(recipe, model, mesh, recorder)
        elif recipe.engine is Engine.DDP:
            yield make_replicated_trainer(recipe, model, STAND_IN)
        elif recipe.engine is Engine.DEEPSPEED:
            with offloading(recipe, recorder):
                yield make_partitioned_trainer(recipe, model)
        else:
            yield make_trainer(recipe, model, STAND_IN.type)


def _sharded(recipe: TrainingRecipe, model: nn.Module, mesh: DeviceMesh, recorder: StorageRecorder) -> Trainer:
    offloads = recipe.offload is not Offload.NONE
    place: AbstractContextManager[None] = recorder.on_host(locked=True) if offloads else nullcontext()
    with place:
        shard(model, recipe, mesh)
        fill_shards(model, recipe, STAND_IN)
    trainer = make_sharded_trainer(recipe, model, STAND_IN.type)
    if not offloads:
        return trainer
    return _OffloadedTrainer(
        recipe=recipe,
        model=model,
        optimizer=trainer.optimizer,
        scaler=trainer.scaler,
        device_type=trainer.device_type,
        recorder=recorder,
    )


def ranks_differ(recipe: TrainingRecipe, trainer: Training) -> bool:
    """Whether ranks hold different sizes: FSDP2's uneven shards; ZeRO-1 and 2 cut weights from a flat tensor."""
    if isinstance(trainer, ShardedTrainer):
        return _has_uneven_shards(trainer.model)
    return recipe.engine is Engine.DEEPSPEED and recipe.gpus > 1 and recipe.zero in (1, 2)


def _has_uneven_shards(model: nn.Module) -> bool:
    return any(
        parameter.shape[0] % parameter.device_mesh.size(-1) != 0
        for parameter in model.parameters()
        if isinstance(parameter, DTensor)
    )
