"""DistributedDataParallel's hooks: the buckets that gradients are reduced in, and when they are built anew."""

from collections.abc import Iterable

from ligerprof.analyzers.estimate.hooks import Hooks, Module, Part
from ligerprof.analyzers.estimate.meter import Allocation, Meter
from ligerprof.analyzers.estimate.tensors import Weight
from ligerprof.analyzers.estimate.traced import layer_of
from ligerprof.recipe.categories import GradSync, Step
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Role
from ligerprof.torch_memory.distributed import bucket_assignment, built_buckets, rebuilt_buckets


class ReplicatedHooks(Hooks):
    """DDP on one rank; what it does is the same on all ranks.

    Args:
        weights: the model's weights by name, in forward order.
    """

    def __init__(self, recipe: TrainingRecipe, weights: Iterable[tuple[str, Weight]], meter: Meter, step: Step) -> None:
        self._recipe, self._meter, self._step = recipe, meter, step
        # gradients arrive in about the reverse order of the weights; the embedding's waits for its first use
        self._arrivals = [(name, weight) for name, weight in reversed(list(weights)) if weight.trainable]
        self._built: list[Allocation] = []
        self._old: list[Allocation] = []
        self._has_reduced = step is not Step.FIRST

    def start_step(self) -> None:
        """The constructor's buckets, or the rebuilt ones."""
        sizes = [weight.size_bytes for _, weight in self._arrivals]
        if self._step is Step.FIRST or (self._step is Step.SECOND and rebuilds_in_second_step(self._recipe)):
            self._built = [self._meter.take(size_bytes, Role.COMMUNICATION) for size_bytes in built_buckets(sizes)]
        else:
            self._rebuild()

    def enter(self, module: Module) -> None:
        """DistributedDataParallel._pre_forward: the first forward pass after a reduction builds buckets anew."""
        if module is Part.ROOT and self._built and self._has_reduced:
            self._old, self._built = self._built, []
            self._rebuild()

    def weight_gradient_arrives(self, weight: Weight) -> None:
        """Copy the gradient to its bucket; the bucket that is complete first is reduced."""
        if not self.reduces:
            return
        if self._recipe.bucket_view and weight.gradient is not None:
            self._meter.drop(weight.gradient)
            weight.gradient = None
        if weight is self._closes_first_bucket():
            self._free_old()

    def end_backward(self) -> None:
        """All buckets are reduced."""
        if self.reduces:
            self._has_reduced = True
            self._free_old()

    def _rebuild(self) -> None:
        for size_bytes in rebuilt_buckets([weight.size_bytes for _, weight in self._arrivals]):
            self._meter.take(size_bytes, Role.COMMUNICATION)

    def _closes_first_bucket(self) -> Weight | None:
        """The weight that completes the first bucket, unless its traced layer represents several."""
        first, *_ = bucket_assignment([weight.size_bytes for _, weight in self._arrivals])
        name, weight = self._arrivals[first[-1]]
        index = layer_of(self._recipe, name)
        return weight if index is None or index == self._recipe.spec.layers - 1 else None

    def _free_old(self) -> None:
        for block in self._old:
            self._meter.drop(block)
        self._old = []


def rebuilds_in_second_step(recipe: TrainingRecipe) -> bool:
    """Whether the first forward pass after a reduction is in the second step, and not in the first one."""
    return recipe.grad_accum == 1 or recipe.grad_sync is GradSync.LAST
