"""What stays on the GPU from step to step, and what the optimizer's step adds: for plain torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ligerprof.analyzers.estimate.context import FP32_BYTES
from ligerprof.analyzers.estimate.tape import Weight
from ligerprof.recipe import TrainingRecipe
from ligerprof.roles import Role
from ligerprof.snapshots.allocator import CachingAllocator
from ligerprof.snapshots.allocator_settings import parse_allocator_settings

Bytes = Mapping[Role, int]
# states as large as the trainable weights
_MOMENTS: Mapping[str, int] = {"adamw-fused": 2, "adamw-foreach": 2, "deepspeed-cpu-adam": 2, "sgd": 0, "none": 0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where weights, gradients and states are, by role.

    Attributes:
        resident: there from before the first step.
        states: there once the optimizer has stepped.
        running: there while forward and backward run, from the second step on.
        first_backward: there while the first step's backward runs.
        reduction: there from backward's first gradient until backward ends.
        gradient_share: the part of each gradient that stays on this GPU once it is whole.
        gradients_at_update: what is left of the gradients when the optimizer steps; None: all that
            backward left.
        update: made and dropped by the optimizer's step.
        host_bytes: main memory that this GPU's process holds.
    """

    resident: Bytes
    states: Bytes
    update: Bytes
    running: Bytes = field(default_factory=dict)
    first_backward: Bytes = field(default_factory=dict)
    reduction: Bytes = field(default_factory=dict)
    gradient_share: float = 1.0
    gradients_at_update: int | None = None
    host_bytes: int = 0


def moment_count(recipe: TrainingRecipe) -> int:
    """Optimizer states as large as the trainable weights."""
    return _MOMENTS[recipe.optimizer]


def torch_placement(recipe: TrainingRecipe, weights: Iterable[Weight]) -> Placement:
    """Weights, optimizer states and foreach AdamW's square roots, block by block."""
    weights = list(weights)
    trainable = [weight.size_bytes for weight in weights if weight.trainable]
    states = [size for size in trainable for _ in range(moment_count(recipe))]
    # the fused optimizer keeps its step counters on the GPU
    steps = [FP32_BYTES for _ in trainable] if recipe.optimizer == "adamw-fused" else []
    foreach = trainable if recipe.optimizer == "adamw-foreach" else []
    allocator = CachingAllocator(settings=parse_allocator_settings(recipe.alloc_conf))
    return Placement(
        resident=_allocate(allocator, Role.PARAMETERS, [weight.size_bytes for weight in weights]),
        states=_allocate(allocator, Role.OPTIMIZER_STATES, [*states, *steps]),
        update=_allocate(allocator, Role.OPTIMIZER_TEMPORARIES, foreach),
    )


def _allocate(allocator: CachingAllocator, role: Role, sizes: list[int]) -> Bytes:
    """Requested bytes under `role`, and what their blocks take beyond that.

    These blocks come one after another and stay, so the allocator's rules tell exactly which
    of them it rounds up and which it does not split.
    """
    before_bytes = allocator.allocated_bytes
    for size_bytes in sizes:
        allocator.malloc(size_bytes)
    requested_bytes = sum(sizes)
    return {role: requested_bytes, Role.ALLOCATOR_ROUNDING: allocator.allocated_bytes - before_bytes - requested_bytes}
