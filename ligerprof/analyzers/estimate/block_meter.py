"""A meter that serves each block of a traced model from the model of torch's allocator, remainders included."""

from collections.abc import Iterable

from ligerprof.analyzers.estimate.hooks import Hooks
from ligerprof.analyzers.estimate.meter import Allocation, Meter, UnsplitRemainders
from ligerprof.analyzers.estimate.placement import Placement, state_sizes, trained_tensors
from ligerprof.analyzers.estimate.static import input_sizes, make_weights
from ligerprof.analyzers.estimate.traced_batch import TracedMicroBatch
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Phase, Role
from ligerprof.torch_memory.allocator.blocks import Block
from ligerprof.torch_memory.allocator.caching import CachingAllocator
from ligerprof.torch_memory.allocator.settings import parse_allocator_settings
from ligerprof.torch_memory.optimizers import OPTIMIZERS


class BlockMeter(Meter):
    """A meter whose blocks have the sizes that the allocator gives them.

    What is counted before the first `start` is in the allocator already, and what is added in sums is only counted.

    Args:
        allocator: holds what is there when the step begins.
    """

    folds = False

    def __init__(self, allocator: CachingAllocator, recipe: TrainingRecipe) -> None:
        super().__init__(parse_allocator_settings(recipe.alloc_conf).rules)
        self._allocator = allocator
        self._blocks: dict[int, Block] = {}
        self._starts = False

    def start(self) -> None:
        """Start a new peak from the current bytes."""
        self._starts = True
        super().start()

    def peak_remainders(self) -> UnsplitRemainders:
        """None: remainders are part of the blocks."""
        return UnsplitRemainders(blocks=0, counted_bytes=0)

    def _served_bytes(self, block: Allocation) -> int:
        if not self._starts:
            return super()._served_bytes(block)
        held = self._blocks[id(block)] = self._allocator.malloc(block.size_bytes)
        return held.size_bytes

    def _freed_bytes(self, block: Allocation) -> int:
        held = self._blocks.pop(id(block), None)
        if held is None:
            return super()._freed_bytes(block)
        # freeing merges it with its neighbours
        size_bytes = held.size_bytes
        self._allocator.free(held)
        return size_bytes


def block_meter(recipe: TrainingRecipe, placement: Placement, micro_batches: int, *, first: bool) -> BlockMeter:
    """The meter of a step in plain torch; before a steady one, the first step has run on the allocator."""
    assert recipe.spec.tape is not None
    allocator = CachingAllocator(settings=parse_allocator_settings(recipe.alloc_conf))
    built: list[Block] = []
    for size_bytes in recipe.spec.tape.built:
        if size_bytes > 0:
            built.append(allocator.malloc(size_bytes))
        else:
            allocator.free(built[-1 - size_bytes])
    for size_bytes in input_sizes(recipe):
        allocator.malloc(size_bytes)
    meter = BlockMeter(allocator, recipe)
    if first:
        return meter
    states = _run_first_step(recipe, BlockMeter(allocator, recipe), allocator, micro_batches)
    # the states came after a step, so their remainders differ from those on an empty device
    rounding = sum(block.size_bytes - block.requested_bytes for block in states)
    meter.add({Role.ALLOCATOR_ROUNDING: rounding - placement.states.get(Role.ALLOCATOR_ROUNDING, 0)})
    return meter


def _run_first_step(
    recipe: TrainingRecipe, meter: BlockMeter, allocator: CachingAllocator, micro_batches: int
) -> list[Block]:
    """Run the first step; returns the blocks of the optimizer's states."""
    assert recipe.spec.tape is not None
    weights = make_weights(recipe)
    workspaces = recipe.spec.tape.workspaces_of(checkpointing=recipe.checkpointing)
    meter.start()
    sizes = dict(zip((Phase.FORWARD, Phase.BACKWARD), workspaces, strict=True))
    meter.expect_workspaces(sizes, recipe.gpu_spec.cublas_workspace_bytes)
    for _ in range(micro_batches):
        passed = TracedMicroBatch(recipe, weights, meter, Hooks())
        with meter.in_thread(Phase.FORWARD):
            passed.forward()
        with meter.in_thread(Phase.BACKWARD):
            passed.backward()
    row, tensors = OPTIMIZERS[recipe.optimizer], trained_tensors(recipe, weights.values())
    _touch(allocator, row.creation(tensors, recipe.gpu_spec))
    states = [allocator.malloc(size_bytes) for size_bytes in state_sizes(recipe, weights.values())]
    _touch(allocator, row.update(tensors, recipe.gpu_spec))
    for weight in weights.values():
        if weight.gradient is not None:
            meter.drop(weight.gradient)
    return states


def _touch(allocator: CachingAllocator, sizes: Iterable[int]) -> None:
    for block in [allocator.malloc(size_bytes) for size_bytes in sizes if size_bytes > 0]:
        allocator.free(block)
