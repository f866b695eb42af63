"""A meter that serves each block of a traced model from the model of torch's allocator, remainders included."""

from collections.abc import Sequence

from ligerprof.analyzers.estimate.meter import Allocation, Meter, UnsplitRemainders
from ligerprof.analyzers.estimate.recording import Recording
from ligerprof.recipe.categories import Engine
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Role
from ligerprof.torch_memory.allocator.caching import Addresses, Block, CachingAllocator
from ligerprof.torch_memory.allocator.settings import parse_allocator_settings


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


def addresses_of(recipe: TrainingRecipe) -> Addresses:
    """Where segments lie: a kernel fills the first weight, but FSDP's shards are made on the CPU."""
    return Addresses(segments_before_kernels=None if recipe.engine.is_fsdp else 1)


def meter_after(recipe: TrainingRecipe, before: Sequence[Recording]) -> Meter:
    """The meter of a part of a run, block by block where a traced model is trained in plain torch or under DDP.

    Args:
        before: the build of the model, and the steps so far; without any, blocks are only rounded.
    """
    settings = parse_allocator_settings(recipe.alloc_conf)
    if not before or recipe.spec.tape is None or recipe.engine not in (Engine.TORCH, Engine.DDP):
        return Meter(settings.rules)
    allocator, addresses, kept = CachingAllocator(settings=settings), addresses_of(recipe), list[tuple[Role, Block]]()
    allocator.place = addresses.place
    for recording in before:
        kept += recording.run_on(allocator)
        addresses.kernels_ran = True
    meter = BlockMeter(allocator, recipe)
    # the first step's states come after its passes, so their remainders differ from those on an empty device
    states = [block for role, block in kept if role is Role.OPTIMIZER_STATES]
    meter.states_rounding = {Role.ALLOCATOR_ROUNDING: sum(block.size_bytes - block.requested_bytes for block in states)}
    return meter
