"""When the bucket that gradients are reduced in is flushed, and what ZeRO-3 allocates then."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ligerprof.analyzers.estimate.hooks import Hooks, Module
from ligerprof.analyzers.estimate.meter import Meter
from ligerprof.analyzers.estimate.partition import weight_width
from ligerprof.analyzers.estimate.tensors import Weight
from ligerprof.models import ParameterShape
from ligerprof.recipe.categories import Offload
from ligerprof.recipe.deepspeed import zero_settings
from ligerprof.recipe.training import TrainingRecipe

# stage3.py, _constant_buffered_norm2: elements per norm computation, in fp64
_NORM_ELEMENTS = 250_000_000
_DOUBLE_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketFlush:
    """One reduction of the bucket's gradients.

    Attributes:
        waiting: the parameter whose gradient does not fit in the bucket; None at the end of backward.
        held: the parameters whose gradients are in the bucket.
    """

    waiting: ParameterShape | None
    held: tuple[ParameterShape, ...]

    @property
    def elements(self) -> int:
        """Elements in the bucket."""
        return sum(item.elements for item in self.held)


def bucket_flushes(recipe: TrainingRecipe) -> Iterator[BucketFlush]:
    """The flushes of a backward pass; gradients arrive from the last parameter to the first."""
    held: list[ParameterShape] = []
    filled, most = 0, zero_settings(recipe)["reduce_bucket_size"]
    for item in reversed(recipe.spec.parameters):
        if held and filled + item.elements > most:
            yield BucketFlush(waiting=item, held=tuple(held))
            held, filled = [], 0
        held.append(item)
        filled += item.elements
    yield BucketFlush(waiting=None, held=tuple(held))


class HeldGradients(Hooks):
    """Stage 3: a gradient that is larger than the bucket stays where it is until the next one arrives.

    Args:
        weights: the trained ones.
    """

    def __init__(self, recipe: TrainingRecipe, weights: Collection[Weight], meter: Meter) -> None:
        most = zero_settings(recipe)["reduce_bucket_size"]
        self._large = {id(weight) for weight in weights if weight.elements > most}
        self._meter = meter
        self._held: Weight | None = None
        for weight in weights:
            if id(weight) in self._large:
                weight.kept_share = 1.0

    def weight_gradient_arrives(self, weight: Weight) -> None:
        """__add_grad_to_ipg_bucket, after the flush of what the bucket had."""
        self._flush()
        self._held = weight if id(weight) in self._large else None

    def gradient_leaves(self, module: Module) -> None:  # noqa: ARG002 - of the hooks
        """The last gradient of a layer is small, or its flush is counted here."""
        self._flush()

    def end_backward(self) -> None:
        """The last flush."""
        self._flush()

    def _flush(self) -> None:
        if self._held is not None and self._held.gradient is not None:
            self._meter.drop(self._held.gradient)
            self._held.gradient = None
        self._held = None


def scattered_elements(recipe: TrainingRecipe, flush: BucketFlush, *, with_held: bool) -> int:
    """What stage 3 allocates for a flush besides the bucket, in elements of the gradients.

    Gradients are copied once more in rank order, except a single gradient that needs no padding
    (coalesced_collectives.py, reduce_scatter_coalesced). With an offloaded optimizer, each partition is read back from
    main memory, and its norm is computed from an fp64 copy (stage3.py, partition_grads).

    Args:
        with_held: also a gradient that is larger than the bucket.
    """
    largest = max(item.elements for item in flush.held)
    alone = len(flush.held) == 1 and largest % recipe.gpus == 0
    copied = 0 if alone else flush.elements
    partition = -(-largest // recipe.gpus) if recipe.offload is not Offload.NONE else 0
    outside = largest if with_held and largest > zero_settings(recipe)["reduce_bucket_size"] else 0
    doubles = _DOUBLE_BYTES // weight_width(recipe)
    return outside + copied + partition + doubles * min(partition, _NORM_ELEMENTS)
