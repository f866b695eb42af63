"""Replay an estimated run through the model of torch's caching allocator: peaks, reserved bytes, and least limits."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from ligerprof.analyzers.estimate.context import is_eager
from ligerprof.analyzers.estimate.evaluation import run_evaluation
from ligerprof.analyzers.estimate.groups import flat_sizes
from ligerprof.analyzers.estimate.placement import Placement, stored_sizes
from ligerprof.analyzers.estimate.places import WHOLE
from ligerprof.analyzers.estimate.recording import Recording
from ligerprof.analyzers.estimate.saving import run_saving
from ligerprof.analyzers.estimate.scaled_dot_product import attention_kernels
from ligerprof.analyzers.estimate.static import input_sizes, make_weights
from ligerprof.analyzers.estimate.step import StepRun, place, run_step, step_kinds
from ligerprof.analyzers.estimate.tensors import Weight
from ligerprof.analyzers.estimate.zero import initialize_zero
from ligerprof.kernels.registry import find_kernel_set
from ligerprof.recipe.categories import Engine
from ligerprof.recipe.lengths import at_longest
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Phase, Role
from ligerprof.torch_memory.allocator.caching import Addresses, AllocatorFullError, Block, CachingAllocator
from ligerprof.torch_memory.allocator.settings import parse_allocator_settings
from ligerprof.torch_memory.attention import AttentionKernel
from ligerprof.torch_memory.distributed import broadcast_scratch
from ligerprof.torch_memory.dtypes import HALF_BYTES

# how far the smallest limit under which the replay completes is from that of a simulated step, as a share of the limit:
# chosen so that no verdict contradicts the simulation for the recipes of tests/data/verdicts; docs/accuracy.md
_UNCERTAIN_SHARE = 0.0002
# where each matrix of attention scores is a tensor, whose place decides on those of others
_UNCERTAIN_SHARE_OF_SCORES = 0.0005
# on several GPUs, where the order of buckets and streams is not known block by block
_UNCERTAIN_SHARE_OF_RANKS = 0.002
# whole runs over different lengths, of which only the largest micro-batch is replayed; above the 3 % under which no
# verdict contradicts the simulated runs of tests/data/verdicts/lengths.jsonl
_UNCERTAIN_SHARE_OF_LENGTHS = 0.05
# the number of the recorded micro-batch that later ones repeat
_REPEATED = 2


class Peak(NamedTuple):
    """The highest moment of a phase: bytes of the allocator's blocks, and how many events of its part came before."""

    allocated_bytes: int
    events: int


@dataclass(frozen=True, eq=False)
class EstimatedRun:
    """The events of a run.

    Attributes:
        recipe: what is trained, and how.
        recordings: of each part of the run, in order: the build, different steps, an evaluation and a save.
        steady: the place of the steady step among them.
    """

    recipe: TrainingRecipe
    recordings: Sequence[Recording]
    steady: int

    @property
    def reserved_bytes(self) -> int:
        """The most that is reserved, without a limit."""
        return self._unlimited[0].highest_reserved_bytes

    @property
    def peaks(self) -> Sequence[Mapping[Phase, Peak]]:
        """Of each part, the peak of each phase, without a limit."""
        return self._unlimited[1]

    def peak_bytes(self, number: int) -> int:
        """The most that is allocated at once in a part, without a limit."""
        return max(peak.allocated_bytes for peak in self.peaks[number].values())

    def held_at(self, number: int, peak: Peak) -> dict[tuple[str, Role], int]:
        """What a part of the run holds at a peak, by part of the model and role; rounding is the whole model's."""
        held, part = Counter[tuple[str, Role]](), self._parts[number]
        live = set[int]()
        for event in part.events[: peak.events]:
            if event >= 0:
                live.add(event)
            else:
                live.discard(~event)
        for each, numbers in (*((before, before.kept) for before in self._parts[:number]), (part, live)):
            for block in numbers:
                held[each.places[block], each.roles[block]] += each.sizes[block]
        held[WHOLE, Role.ALLOCATOR_ROUNDING] += peak.allocated_bytes - held.total()
        return held

    def completes_under(self, limit_bytes: int) -> bool:
        """Whether the run completes under a limit on reserved bytes; what is cached is given back if it must be."""
        if not self._unlimited[0].highest_allocated_bytes <= limit_bytes < self.reserved_bytes:
            return self.reserved_bytes <= limit_bytes
        try:
            self._replay(limit_bytes)
        except AllocatorFullError:
            return False
        return True

    def keeps_cache_under(self, limit_bytes: int) -> bool:
        """Whether later steps under a limit never give cached memory back, which costs time in each of them."""
        try:
            allocator, _ = self._replay(limit_bytes)
            if not allocator.retries:
                return True
            self._replay_part(allocator, self._parts[self.steady])
            retries = allocator.retries
            self._replay_part(allocator, self._parts[self.steady])
        except AllocatorFullError:
            return False
        return allocator.retries == retries

    @property
    def uncertain_share(self) -> float:
        """How far the least limit that the run completes under may be from the simulation's."""
        recipe = at_longest(self.recipe)
        share = _UNCERTAIN_SHARE
        if recipe.engine is not Engine.TORCH:
            share = _UNCERTAIN_SHARE_OF_RANKS
        elif is_eager(recipe) or AttentionKernel.MATH in attention_kernels(recipe):
            share = _UNCERTAIN_SHARE_OF_SCORES
        return share if self.recipe.lengths is None else _UNCERTAIN_SHARE_OF_LENGTHS

    @cached_property
    def _unlimited(self) -> tuple[CachingAllocator, Sequence[Mapping[Phase, Peak]]]:
        return self._replay(None)

    @cached_property
    def _parts(self) -> Sequence[Recording]:
        return [recording.unfolded() for recording in self.recordings]

    def _replay(self, limit_bytes: int | None) -> tuple[CachingAllocator, Sequence[Mapping[Phase, Peak]]]:
        settings = parse_allocator_settings(self.recipe.alloc_conf)
        allocator = CachingAllocator(settings=settings, capacity_bytes=limit_bytes)
        # a kernel fills the first weight, but FSDP's shards are made on the CPU
        addresses = Addresses(segments_before_kernels=None if self.recipe.engine.is_fsdp else 1)
        allocator.place = addresses.place
        peaks = []
        for part in self._parts:
            peaks.append(self._replay_part(allocator, part))
            addresses.kernels_ran = True
        return allocator, peaks

    def _replay_part(self, allocator: CachingAllocator, part: Recording) -> Mapping[Phase, Peak]:
        held: dict[int, Block] = {}
        highest: dict[Phase, Peak] = {}
        marks = part.micro_batches or [0]

        def run(start: int, stop: int) -> None:
            for phase, first, last in part.pieces(start, stop):
                peak = _replay_events(allocator, part, first, last, held)
                highest[phase] = max(highest.get(phase, peak), peak, key=lambda each: each.allocated_bytes)

        run(0, marks[0])
        for number, (start, stop) in enumerate(pairwise(marks), start=1):
            # the second of the recorded micro-batches repeats
            repeats = number == _REPEATED and _stands_alone(part.events[start:stop])
            for repeat in range(self.recipe.grad_accum - len(marks) + 2 if repeats else 1):
                reserved_bytes, retries = allocator.reserved_bytes, allocator.retries
                run(start, stop)
                # without new segments, what it leaves is what it found
                if allocator.reserved_bytes == reserved_bytes and (repeat or allocator.retries == retries):
                    break
        ends = [*part.emptied, len(part.events)]
        for start, stop in pairwise([marks[-1], *ends]):
            run(start, stop)
            if stop in part.emptied:
                allocator.empty_cache()
        for number, block in held.items():
            if number not in part.kept:
                allocator.free(block)
        return highest


def _replay_events(allocator: CachingAllocator, part: Recording, first: int, last: int, held: dict[int, Block]) -> Peak:
    """Replay a range of events; returns its highest moment."""
    sizes, streams, malloc, free = part.sizes, part.streams, allocator.malloc, allocator.free
    highest_bytes, highest = allocator.allocated_bytes, first
    for at, event in enumerate(part.events[first:last], start=first):
        if event < 0:
            free(held.pop(~event))
            continue
        held[event] = malloc(sizes[event], stream=streams[event])
        if allocator.allocated_bytes > highest_bytes:
            highest_bytes, highest = allocator.allocated_bytes, at + 1
    return Peak(highest_bytes, highest)


def _stands_alone(events: Sequence[int]) -> bool:
    """Whether these events free what they allocate, and nothing else."""
    return {event for event in events if event >= 0} == {~event for event in events if event < 0}


def run_estimate(recipe: TrainingRecipe, given: TrainingRecipe | None = None) -> tuple[EstimatedRun, StepRun]:
    """The run of a recipe, and its steady step.

    Args:
        given: whose lengths are what the recipe has the largest micro-batch of.
    """
    kernels = find_kernel_set(recipe.providers, recipe.spec)
    weights = list(make_weights(recipe).values())
    recordings, ran = [_built(recipe, weights, place(recipe, weights, first=True))], None
    for step in step_kinds(recipe):
        ran = run_step(recipe, kernels, step, recordings)
        recordings.append(ran.recording)
    assert ran is not None
    steady = len(recordings) - 1
    recordings += [run_evaluation(recipe, kernels, recordings), run_saving(recipe)]
    return EstimatedRun(given or recipe, recordings, steady), ran


def _built(recipe: TrainingRecipe, weights: Sequence[Weight], placement: Placement) -> Recording:
    """The build of the model, and the batch: what is there before the first step, in the order in which it comes."""
    recording = Recording()
    if recipe.spec.tape is not None and recipe.engine in (Engine.TORCH, Engine.DDP):
        recording.build(recipe.spec.tape.built)
    elif recipe.engine is Engine.DEEPSPEED:
        _build(recipe, weights, recording)
        # adapters come after the model's own weights
        in_order = sorted(weights, key=lambda weight: weight.is_adapter)
        initialize_zero(recipe, in_order, placement, recording)
    elif placement.resident:
        build = _build_units if recipe.engine is Engine.FSDP1 else _build
        build(recipe, weights, recording)
        recording.keep(() if recipe.spec.tape is None else recipe.spec.tape.buffers, Role.PARAMETERS)
    if recipe.engine is Engine.DDP:
        kinds = ((0 if weight.packed_sizes else weight.width, weight.stored_sizes[0]) for weight in weights)
        recording.run(broadcast_scratch(kinds), Role.COMMUNICATION)
    recording.keep(input_sizes(recipe), Role.INPUTS, WHOLE)
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
