"""ZeRO's stages 1 and 2 on one rank: the bucket that gradients are reduced in (stage_1_and_2.py of DeepSpeed)."""

from collections.abc import Iterable, Iterator, Sequence

from ligerprof.analyzers.estimate.hooks import Hooks
from ligerprof.analyzers.estimate.meter import Allocation, Meter
from ligerprof.analyzers.estimate.partition import part, weight_width
from ligerprof.analyzers.estimate.tensors import Weight
from ligerprof.recipe.categories import Offload
from ligerprof.recipe.deepspeed import zero_settings
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Role
from ligerprof.torch_memory.dtypes import FP32_BYTES


class PartitionedHooks(Hooks):
    """Stage 2 reduces gradients as they arrive; stage 1 those of the last micro-batch, when its backward has ended."""

    def __init__(self, recipe: TrainingRecipe, weights: Iterable[Weight], meter: Meter, rank: int) -> None:
        self._recipe, self._meter = recipe, meter
        self._settings = zero_settings(recipe)
        self._trained = [weight for weight in weights if weight.trainable]
        self._slices = dict(zip(map(id, self._trained), _slices(recipe, self._trained), strict=True))
        # by weight, the elements that are this rank's
        self._own = {id(weight): elements for weight, elements in own_weights(recipe, self._trained, rank)}
        self._buckets: list[Allocation] = []
        self._held: list[Weight] = []
        # of this micro-batch and of those before
        self._partition: Allocation | None = None
        self._accumulated: Allocation | None = None

    def weight_gradient_arrives(self, weight: Weight) -> None:
        """process_gradients, which allocates the buckets with the first gradient (setup_buckets)."""
        if not self._buckets:
            bucket_bytes = weight_width(self._recipe) * self._settings["reduce_bucket_size"]
            # double buffers where reduction overlaps with backward
            count = 2 if self._settings["overlap_comm"] else 1
            self._buckets = [self._meter.take(bucket_bytes, Role.COMMUNICATION) for _ in range(count)]
        if self._recipe.zero == 2 or (self.reduces and self._settings["overlap_comm"]):
            self._collect(weight)

    def end_backward(self) -> None:
        """reduce_gradients of stage 1, then independent_gradient_partition_epilogue."""
        if self._recipe.zero == 1 and not self.reduces:
            return
        if self._recipe.zero == 1 and not self._settings["overlap_comm"]:
            for weight in self._trained:
                if weight.gradient is not None:
                    self._collect(weight)
        self._flush()
        for weight in self._trained:
            self._free(weight)
        self._accumulate()
        for bucket in self._buckets:
            self._meter.drop(bucket)
        self._buckets = []

    def _collect(self, weight: Weight) -> None:
        """reduce_independent_p_g_buckets_and_remove_grads."""
        most = self._settings["reduce_bucket_size"]
        if sum(item.elements for item in self._held) + weight.elements > most:
            self._flush()
        self._held.append(weight)
        if weight.elements <= most:
            self._free(weight)
        elif self._recipe.offload is not Offload.NONE:
            # a gradient that is too large for the bucket is cloned
            self._meter.touch(weight.size_bytes, Role.COMMUNICATION)

    def _flush(self) -> None:
        """reduce_ipg_grads."""
        copied = max(_flattened(self._slices_held(), self._settings["reduce_bucket_size"]), default=0)
        self._meter.touch(weight_width(self._recipe) * copied, Role.COMMUNICATION)
        for weight in self._held:
            if id(weight) in self._own:
                self._copy_to_partition(weight)
            elif self._recipe.zero == 2:
                self._free(weight)
        self._held = []

    def _slices_held(self) -> list[int]:
        """Elements of the slices that the bucket is reduced in: successive ones of a rank are one (average_tensor)."""
        merged: list[tuple[int, int]] = []
        for weight in self._held:
            for rank, elements in self._slices[id(weight)]:
                if merged and merged[-1][0] == rank:
                    elements += merged.pop()[1]  # noqa: PLW2901 - the slice grows
                merged.append((rank, elements))
        return [elements for _, elements in merged]

    def _copy_to_partition(self, weight: Weight) -> None:
        """copy_grads_in_partition: to a buffer of this rank's gradients, or in fp32 to main memory."""
        if self._recipe.offload is not Offload.NONE:
            if self.reduces:
                self._offload(weight)
            return
        if self._partition is None:
            own = sum(item.size_bytes for item in self._trained if id(item) in self._own)
            self._partition = self._meter.take(own, Role.GRADIENTS)
        self._free(weight)

    def _offload(self, weight: Weight) -> None:
        """The norm's fp64 copy of the rank's part (set_norm_for_param_grad_in_gpu), then one in fp32 to main memory."""
        self._meter.touch(2 * FP32_BYTES * self._own[id(weight)], Role.COMMUNICATION)
        self._free(weight)

    def _accumulate(self) -> None:
        """all_grad_tensors: the first micro-batch's gradients stay, and later ones are added to them."""
        if self._partition is None:
            return
        if self._accumulated is None:
            self._accumulated = self._partition
        else:
            self._meter.drop(self._partition)
        self._partition = None

    def _free(self, weight: Weight) -> None:
        if weight.gradient is not None:
            self._meter.drop(weight.gradient)
            weight.gradient = None


def outer_ranks(recipe: TrainingRecipe) -> tuple[int, ...]:
    """The ranks whose memory is estimated: the first and the last, whose weights differ under ZeRO-1 and 2."""
    return (0, recipe.gpus - 1) if recipe.zero in (1, 2) and recipe.gpus > 1 else (0,)


def own_weights(recipe: TrainingRecipe, trained: Sequence[Weight], rank: int) -> list[tuple[Weight, int]]:
    """The weights with a part in a rank's share, whose gradients stay whole (params_in_partition), and its elements."""
    slices = zip(trained, map(dict, _slices(recipe, trained)), strict=True)
    return [(weight, own[rank]) for weight, own in slices if rank in own]


def _slices(recipe: TrainingRecipe, trained: Sequence[Weight]) -> Iterator[list[tuple[int, int]]]:
    """Per weight the ranks that it is divided among, with the elements of each (initialize_gradient_partition)."""
    # shares are multiples of nccl_start_alignment_factor
    share, start = 2 * -(-part(recipe, sum(weight.elements for weight in trained)) // 2), 0
    for weight in trained:
        end = start + weight.elements
        yield [
            (rank, min(end, (rank + 1) * share) - max(start, rank * share))
            for rank in range(start // share, -(-end // share))
        ]
        start = end


def _flattened(slices: Iterable[int], most: int) -> Iterator[int]:
    """Elements of each flat copy: slices are flattened until one exceeds the bucket (allreduce_and_scatter).

    A single slice is not copied.
    """
    filled = count = 0
    for elements in slices:
        filled, count = filled + elements, count + 1
        if filled > most:
            yield filled if count > 1 else 0
            filled = count = 0
    yield filled if count > 1 else 0
