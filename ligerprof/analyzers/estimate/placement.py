"""The memory that stays on the GPU between steps, and that of the optimizer's step, for all engines but DeepSpeed."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from ligerprof.analyzers.estimate.groups import shard_sizes, trained_shards
from ligerprof.analyzers.estimate.recording import Recording
from ligerprof.analyzers.estimate.tensors import Weight
from ligerprof.recipe.categories import Offload
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Role
from ligerprof.torch_memory.dtypes import DTYPE_BYTES, Scratch, highest_bytes
from ligerprof.torch_memory.optimizers import OPTIMIZERS, OptimizedTensor

Bytes = Mapping[Role, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Bytes of weights, gradients and states on the GPU, by role and by when they exist.

    Attributes:
        resident: exist from before the first step.
        states: exist after the first optimizer step.
        last_reduction: comes and goes after backward, while the last gradients are reduced.
        gradients_at_update: gradients that remain at the optimizer step; None for all of them.
        updates: temporaries of each part of the optimizer step; in a first step with the states created so far.
        blocks: of the optimizer's step, block by block; None if only the sums are known.
        record_update: records that step's blocks in order; None if `blocks` has them.
    """

    resident: Bytes
    states: Bytes
    updates: Sequence[Bytes]
    last_reduction: Bytes = field(default_factory=dict)
    gradients_at_update: int | None = None
    blocks: "UpdateBlocks | None" = None
    record_update: Callable[[Recording], None] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateBlocks:
    """The sizes of what an optimizer's step allocates, block by block.

    Attributes:
        states: what stays from the first step on.
        creation: temporaries of the first step.
        update: temporaries of every step.
    """

    states: Sequence[int]
    creation: Scratch
    update: Scratch


def torch_placement(recipe: TrainingRecipe, weights: Iterable[Weight], *, first: bool) -> Placement:
    """Weights, optimizer states and the temporaries of the optimizer's step, block by block; shards under FSDP2."""
    weights = list(weights)
    if recipe.engine.is_fsdp and recipe.offload is not Offload.NONE:
        return Placement(resident={}, states={}, updates=())
    row, tensors = OPTIMIZERS[recipe.optimizer], trained_tensors(recipe, weights)
    blocks = UpdateBlocks(
        states=state_sizes(recipe, weights),
        creation=row.creation(tensors, recipe.gpu_spec),
        update=row.update(tensors, recipe.gpu_spec),
    )
    states = {Role.OPTIMIZER_STATES: sum(blocks.states)}
    update = {Role.OPTIMIZER_TEMPORARIES: highest_bytes(blocks.update)}
    creation = {Role.OPTIMIZER_TEMPORARIES: highest_bytes(blocks.creation)}
    return Placement(
        resident={Role.PARAMETERS: sum(stored_sizes(recipe, weights))},
        states=states,
        updates=(Counter(states) + Counter(creation), Counter(states) + Counter(update)) if first else (update,),
        blocks=blocks,
    )


def stored_sizes(recipe: TrainingRecipe, weights: Iterable[Weight]) -> list[int]:
    """Bytes of each tensor that holds a weight."""
    if recipe.engine.is_fsdp:
        return shard_sizes(recipe, weights)
    return [size for weight in weights for size in weight.stored_sizes]


def trained_tensors(recipe: TrainingRecipe, weights: Iterable[Weight]) -> list[OptimizedTensor]:
    """The trainable weights as the optimizer sees them; under FSDP the shards of the rank that has most."""
    trained = [weight for weight in weights if weight.trainable]
    if recipe.engine.is_fsdp:
        width = DTYPE_BYTES[recipe.weight_dtype]
        return [_optimized(recipe, weight, shape, width) for weight, shape in trained_shards(recipe, trained)]
    return [_optimized(recipe, weight, weight.shape, weight.width) for weight in trained]


def _optimized(recipe: TrainingRecipe, weight: Weight, shape: tuple[int, ...], width: int) -> OptimizedTensor:
    return OptimizedTensor(
        shape=shape,
        elements=prod(shape),
        width=width,
        in_layer=weight.layer is not None,
        galore_rank=recipe.galore_rank,
        fp32_moments=recipe.fp32_embedding_states and weight.in_embedding,
    )


def state_sizes(recipe: TrainingRecipe, weights: Iterable[Weight]) -> list[int]:
    """Bytes of each tensor that the optimizer keeps on the GPU, in torch's allocator."""
    row = OPTIMIZERS[recipe.optimizer]
    return [*row.shared, *(size for tensor in trained_tensors(recipe, weights) for size in row.states(tensor))]


def paged_bytes(recipe: TrainingRecipe, weights: Iterable[Weight]) -> int:
    """Bytes of optimizer states in CUDA's managed memory, outside torch's allocator."""
    row = OPTIMIZERS[recipe.optimizer]
    return sum(row.paged(tensor) for tensor in trained_tensors(recipe, weights))
