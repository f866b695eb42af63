"""Blocks of a traced model come from the model of torch's allocator."""

from ligerprof.analyzers.estimate.block_meter import BlockMeter
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Role
from ligerprof.torch_memory.allocator.caching import CachingAllocator
from ligerprof.units import MIB


def test_counts_what_the_allocator_holds_with_unsplit_remainders() -> None:
    allocator = CachingAllocator()
    meter = BlockMeter(allocator, TrainingRecipe(model="tiny"))
    meter.start()
    # a segment of 20 MiB, of which less than 1 MiB is left
    sizes = (5 * MIB, 100, 14 * MIB + 600_000, 300)
    blocks = []
    for size_bytes in sizes:
        blocks.append(meter.take(size_bytes, Role.ACTIVATIONS))
        assert meter.total_bytes == allocator.allocated_bytes
    assert meter.total_bytes > sum(sizes) + 4 * 512
    meter.run_scratch((2 * MIB, MIB, -2 * MIB, -MIB), Role.ACTIVATIONS)
    for block in blocks:
        meter.drop(block)
        assert meter.total_bytes == allocator.allocated_bytes
    assert meter.total_bytes == 0
    assert meter.peak().total_bytes == allocator.highest_allocated_bytes
