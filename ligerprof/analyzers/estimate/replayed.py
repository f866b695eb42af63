"""Replay an estimated run through the model of torch's caching allocator: what is reserved, and under which limits."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from ligerprof.analyzers.estimate.block_meter import addresses_of
from ligerprof.analyzers.estimate.context import is_eager
from ligerprof.analyzers.estimate.groups import flat_sizes
from ligerprof.analyzers.estimate.placement import Placement, stored_sizes
from ligerprof.analyzers.estimate.recording import Recording
from ligerprof.analyzers.estimate.scaled_dot_product import attention_kernels
from ligerprof.analyzers.estimate.static import input_sizes
from ligerprof.analyzers.estimate.tensors import Weight
from ligerprof.analyzers.estimate.zero import initialize_zero
from ligerprof.recipe.categories import Engine
from ligerprof.recipe.lengths import at_longest
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Role
from ligerprof.torch_memory.allocator.caching import AllocatorFullError, Block, CachingAllocator
from ligerprof.torch_memory.allocator.settings import parse_allocator_settings
from ligerprof.torch_memory.attention import AttentionKernel
from ligerprof.torch_memory.distributed import broadcast_scratch
from ligerprof.torch_memory.dtypes import HALF_BYTES

# how far the smallest limit under which the replay completes is from that of a simulated step, as a share of the limit:
# chosen so that no verdict contradicts the simulation for the recipes of tests/data/verdicts; docs/accuracy.md
_UNCERTAIN_SHARE = 0.0015
# where each matrix of attention scores is a tensor, whose place decides on those of others
_UNCERTAIN_SHARE_OF_SCORES = 0.002
# whole runs over different lengths, of which only the largest micro-batch is replayed; above the 3 % under which no
# verdict contradicts the simulated runs of tests/data/verdicts/lengths.jsonl
_UNCERTAIN_SHARE_OF_LENGTHS = 0.05
# the place of the steady step among the recordings, after the build and the first step
_STEADY = 2
# the number of the recorded micro-batch that later ones repeat
_REPEATED = 2


@dataclass(frozen=True, eq=False)
class EstimatedRun:
    """The events of a run.

    Attributes:
        recipe: what is trained, and how.
        recordings: of each part of the run, in order: the build, different steps, an evaluation and a save.
        least_bytes: what the run allocates at least.
    """

    recipe: TrainingRecipe
    recordings: Sequence[Recording]
    least_bytes: int

    @cached_property
    def reserved_bytes(self) -> int:
        """The most that is reserved, without a limit."""
        return self._unlimited.highest_reserved_bytes

    def completes_under(self, limit_bytes: int) -> bool:
        """Whether the run completes under a limit on reserved bytes; what is cached is given back if it must be."""
        if limit_bytes < self.least_bytes:
            return False
        if not self._unlimited.highest_allocated_bytes <= limit_bytes < self.reserved_bytes:
            return self.reserved_bytes <= limit_bytes
        try:
            self._replay(limit_bytes)
        except AllocatorFullError:
            return False
        return True

    def keeps_cache_under(self, limit_bytes: int) -> bool:
        """Whether later steps under a limit never give cached memory back, which costs time in each of them."""
        if limit_bytes < self.least_bytes:
            return False
        try:
            allocator = self._replay(limit_bytes)
            if not allocator.retries:
                return True
            self._replay_part(allocator, self._parts[_STEADY])
            retries = allocator.retries
            self._replay_part(allocator, self._parts[_STEADY])
        except AllocatorFullError:
            return False
        return allocator.retries == retries

    @property
    def uncertain_share(self) -> float:
        """How far the least limit that the run completes under may be from the simulation's."""
        recipe = at_longest(self.recipe)
        scores = is_eager(recipe) or AttentionKernel.MATH in attention_kernels(recipe)
        share = _UNCERTAIN_SHARE_OF_SCORES if scores else _UNCERTAIN_SHARE
        return share if self.recipe.lengths is None else _UNCERTAIN_SHARE_OF_LENGTHS

    @cached_property
    def _unlimited(self) -> CachingAllocator:
        return self._replay(None)

    @cached_property
    def _parts(self) -> Sequence[Recording]:
        return [recording.unfolded() for recording in self.recordings]

    def _replay(self, limit_bytes: int | None) -> CachingAllocator:
        settings = parse_allocator_settings(self.recipe.alloc_conf)
        allocator, addresses = (
            CachingAllocator(settings=settings, capacity_bytes=limit_bytes),
            addresses_of(self.recipe),
        )
        allocator.place = addresses.place
        for part in self._parts:
            self._replay_part(allocator, part)
            addresses.kernels_ran = True
        return allocator

    def _replay_part(self, allocator: CachingAllocator, part: Recording) -> None:
        held: dict[int, Block] = {}
        marks = part.micro_batches or [0]
        _replay_events(allocator, part, part.events[: marks[0]], held)
        for number, (start, stop) in enumerate(pairwise(marks), start=1):
            events = part.events[start:stop]
            # the second of the recorded micro-batches repeats
            repeats = number == _REPEATED and _stands_alone(events)
            for repeat in range(self.recipe.grad_accum - len(marks) + 2 if repeats else 1):
                reserved_bytes, retries = allocator.reserved_bytes, allocator.retries
                _replay_events(allocator, part, events, held)
                # without new segments, what it leaves is what it found
                if allocator.reserved_bytes == reserved_bytes and (repeat or allocator.retries == retries):
                    break
        for start, stop in pairwise([marks[-1], *part.emptied]):
            _replay_events(allocator, part, part.events[start:stop], held)
            allocator.empty_cache()
        _replay_events(allocator, part, part.events[part.emptied[-1] if part.emptied else marks[-1] :], held)
        for number, block in held.items():
            if number not in part.kept:
                allocator.free(block)


def _replay_events(allocator: CachingAllocator, part: Recording, events: Sequence[int], held: dict[int, Block]) -> None:
    sizes, streams, malloc, free = part.sizes, part.streams, allocator.malloc, allocator.free
    for event in events:
        if event >= 0:
            held[event] = malloc(sizes[event], stream=streams[event])
        else:
            free(held.pop(~event))


def _stands_alone(events: Sequence[int]) -> bool:
    """Whether these events free what they allocate, and nothing else."""
    return {event for event in events if event >= 0} == {~event for event in events if event < 0}


def built(recipe: TrainingRecipe, weights: Sequence[Weight], placement: Placement) -> Recording:
    """The build of the model, and the batch: what is there before the first step, in the order in which it comes."""
    recording = Recording()
    if recipe.spec.tape is not None and recipe.engine in (Engine.TORCH, Engine.DDP):
        recording.build(recipe.spec.tape.built)
    elif recipe.engine is Engine.DEEPSPEED:
        _build(recipe, weights, recording)
        initialize_zero(recipe, weights, placement, recording)
    elif placement.resident:
        build = _build_units if recipe.engine is Engine.FSDP1 else _build
        build(recipe, weights, recording)
    if recipe.engine is Engine.DDP:
        kinds = ((0 if weight.packed_sizes else weight.width, weight.stored_sizes[0]) for weight in weights)
        recording.run(broadcast_scratch(kinds), Role.COMMUNICATION)
    recording.keep(input_sizes(recipe), Role.PARAMETERS)
    return recording


def _build(recipe: TrainingRecipe, weights: Sequence[Weight], recording: Recording) -> None:
    """Weights one after another."""
    own = [weight for weight in weights if not weight.is_adapter]
    packed = [weight for weight in own if weight.packed_sizes]
    recording.keep(stored_sizes(recipe, [weight for weight in own if not weight.packed_sizes]), Role.PARAMETERS)
    if recipe.spec.tied_embeddings and not packed:
        # a tied head has a weight of its own until it is tied
        recording.touch([weights[0].size_bytes], Role.PARAMETERS)
    for weight in packed:
        whole = recording.allocate(weight.elements * HALF_BYTES, Role.PARAMETERS)
        recording.keep(weight.packed_sizes, Role.PARAMETERS)
        recording.free(whole)
    recording.keep(stored_sizes(recipe, [weight for weight in weights if weight.is_adapter]), Role.PARAMETERS)


def _build_units(recipe: TrainingRecipe, weights: Sequence[Weight], recording: Recording) -> None:
    """FSDP1 makes the weights of each unit whole and joins them before it keeps its part."""
    for sizes in flat_sizes(recipe, weights):
        whole = [recording.allocate(item.whole_bytes, Role.PARAMETERS) for item in sizes.parameters]
        whole.append(recording.allocate(sizes.whole_bytes, Role.PARAMETERS))
        recording.keep([sizes.gradient_bytes], Role.PARAMETERS)
        for block in reversed(whole):
            recording.free(block)
