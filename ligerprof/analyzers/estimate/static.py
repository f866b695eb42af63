"""Bytes that stay from step to step: weights, optimizer states, library workspaces, the batch."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ligerprof.analyzers.estimate.context import DTYPE_BYTES, FP32_BYTES, INDEX_BYTES
from ligerprof.analyzers.estimate.lora import adapter_weights
from ligerprof.analyzers.estimate.tape import Weight
from ligerprof.recipe import TrainingRecipe
from ligerprof.roles import Role
from ligerprof.snapshots.allocator import CachingAllocator

# states as large as the trainable weights, in their dtype
_MOMENTS: Mapping[str, int] = {"adamw-fused": 2, "adamw-foreach": 2, "sgd": 0, "none": 0}
# torch keeps one cuBLAS workspace a thread: one for forward, one for autograd's backward thread
CUBLAS_THREADS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticBytes:
    """What the step finds in place.

    Attributes:
        weights, optimizer: bytes by role, what the allocator rounds up included.
        foreach: one temporary for each trainable weight, as foreach AdamW makes for its square roots.
    """

    weights: Mapping[Role, int]
    optimizer: Mapping[Role, int]
    foreach: Mapping[Role, int]


def make_weights(recipe: TrainingRecipe) -> dict[str, Weight]:
    """Every parameter of the model by transformers' name."""
    width = DTYPE_BYTES[recipe.weight_dtype]
    adapters = dict(adapter_weights(recipe))
    weights = {item.name: Weight(item.elements, width, trainable=not adapters) for item in recipe.spec.parameters}
    if recipe.spec.tied_embeddings:
        weights[recipe.spec.parameters[0].name].uses = 2
    return {**weights, **adapters}


def static_bytes(recipe: TrainingRecipe, weights: Iterable[Weight]) -> StaticBytes:
    """Weights, optimizer states and what the optimizer step adds, block by block."""
    weights = list(weights)
    trainable = [weight.size_bytes for weight in weights if weight.trainable]
    states = [size for size in trainable for _ in range(moment_count(recipe))]
    # the fused optimizer keeps its step counters on the GPU
    steps = [FP32_BYTES for _ in trainable] if recipe.optimizer == "adamw-fused" else []
    foreach = trainable if recipe.optimizer == "adamw-foreach" else []
    allocator = CachingAllocator()
    return StaticBytes(
        weights=_allocate(allocator, Role.PARAMETERS, [weight.size_bytes for weight in weights]),
        optimizer=_allocate(allocator, Role.OPTIMIZER_STATES, [*states, *steps]),
        foreach=_allocate(allocator, Role.OPTIMIZER_TEMPORARIES, foreach),
    )


def _allocate(allocator: CachingAllocator, role: Role, sizes: list[int]) -> dict[Role, int]:
    """Requested bytes under `role`, and what their blocks take beyond that.

    These blocks come one after another and stay, so the allocator's rules tell exactly which
    of them it rounds up and which it does not split.
    """
    before_bytes = allocator.allocated_bytes
    for size_bytes in sizes:
        allocator.malloc(size_bytes)
    requested_bytes = sum(sizes)
    return {role: requested_bytes, Role.ALLOCATOR_ROUNDING: allocator.allocated_bytes - before_bytes - requested_bytes}


def moment_count(recipe: TrainingRecipe) -> int:
    """Optimizer states as large as the trainable weights."""
    return _MOMENTS[recipe.optimizer]


def input_sizes(recipe: TrainingRecipe) -> Iterator[int]:
    """Bytes of each tensor of the batch: tokens that are their own labels; with padding, a mask and labels."""
    yield recipe.tokens * INDEX_BYTES
    if recipe.padding:
        yield recipe.tokens * INDEX_BYTES
        yield recipe.tokens * INDEX_BYTES
