"""Find weights: by what builds allocate, by gradients that passes leave, copies of them, and those of earlier models.

A later model was built after an optimizer had stepped, or after blocks that are older than the recording. Its passes
use no other model if a single line of the program runs models, all of whose parts take part in backward: a teacher, a
reference model or a frozen encoder runs without gradients, and the networks of a GAN run from lines of their own.

Every gradient belongs to a weight of its size. If the blocks of each such size that are older than the recording, and
live through it, are exactly as many as the gradients, they are the weights. With Adam's moments among them, they are
three times as many, and nothing shows which of them are weights.
"""

import re
from collections import Counter
from collections.abc import Hashable
from functools import cached_property

import numpy as np

from ligerprof.analyzers.attribution import frames
from ligerprof.analyzers.attribution.phases import BlockFinder, DeviceBlocks, are_codes_of, phase_code
from ligerprof.roles import Phase
from ligerprof.snapshots.trace import Flags, Int64s, groups, number_pairs

# a wrapper that shards weights moves them first
_CONSTRUCTOR = re.compile(r"nn/modules/\w+\.py:__init__$|fsdp/\S*:_move_states_to_device$", re.MULTILINE)
# what optimizers allocate for each weight
STATE = re.compile(frames.OPTIMIZER_STATE, re.MULTILINE)
_TABLE = re.compile(frames.EMBEDDING_TABLE, re.MULTILINE)
# buffers and partitions that an engine or a wrapper makes of the weights
_ENGINE = re.compile(r"deepspeed/runtime/|nn/parallel/distributed\.py:|distributed/utils\.py:_sync_")


class Weights(BlockFinder):
    """The sizes of weights as seen from a moment.

    Args:
        moment: the blocks of the build that are live at this moment are weights.

    Attributes:
        sizes: sizes allocated while the model was built, including weights that an engine has since partitioned.
        live_sizes: how many live blocks of the build have each size.
    """

    def __init__(self, blocks: DeviceBlocks, moment: int) -> None:
        super().__init__(blocks)
        self._in_build = blocks.in_phase(Phase.BUILD)
        live = self._replayed.live_at(moment)
        live = live[self._in_build[live]]
        # what constructors of torch's modules allocated counts, live or not
        constructed = np.flatnonzero(self._call_sites.matching(_CONSTRUCTOR) & self._in_build)
        self._built = np.append(live, constructed)
        self.sizes = frozenset(self._sizes[self._built].tolist())
        self.live_sizes = Counter(self._sizes[live].tolist())

    def excludes(self, size: int) -> bool:
        """Whether a gradient of a weight cannot have this size; False if the weights are unknown."""
        return bool(self.sizes) and size not in self._possible

    @cached_property
    def _possible(self) -> frozenset[int]:
        """Sizes of weights, of optimizer states and of all weights at once."""
        states = frozenset(np.unique(self._sizes[self._call_sites.matching(STATE)]).tolist())
        total_bytes = sum(size * count for size, count in self.live_sizes.items())
        return self.sizes | states | {total_bytes}

    @cached_property
    def head_sizes(self) -> frozenset[int]:
        """Sizes of embeddings, which the head's weight shares; else the largest size of a weight."""
        tables = self._sizes[self._built[self._call_sites.matching(_TABLE)[self._built]]].tolist()
        if tables:
            return frozenset(tables)
        own = self._sizes[self._in_build & ~self._call_sites.matching_inner(_ENGINE)]
        return frozenset(own.max(keepdims=True, initial=0).tolist())


# step counters of an optimizer are as large as a weight of one element
_LARGEST_COUNTER_BYTES = 8


def find_older_weights(blocks: DeviceBlocks) -> Flags:
    """Whether each block is a weight from before the recording; none is if their number leaves any doubt."""
    replayed = blocks.replayed
    weights: Flags = np.zeros(len(replayed.freed_by), dtype=bool)
    older = np.arange(len(replayed.older_blocks))
    unknown = blocks.call_sites.at(lambda site: not site.is_known)[older]
    older = older[unknown & (replayed.freed_by[older] < 0)]
    gradients = gradients_of_passes(blocks) if len(older) else Counter[int]()
    sizes = replayed.requested_bytes[older]
    held = Counter(sizes.tolist())
    if gradients and all(held[size] == count for size, count in gradients.items()):
        weights[older[np.isin(sizes, list(gradients))]] = True
    return weights


def gradients_of_passes(blocks: DeviceBlocks) -> Counter[int]:
    """How many blocks of each size the last two backward passes both leave behind; empty with fewer."""
    sizes = blocks.replayed.requested_bytes
    # the recording does not see its last pass to the end
    whole = blocks.in_phase(Phase.BACKWARD) & (blocks.spans < blocks.phases.last_span)
    made = np.flatnonzero(whole & (sizes > _LARGEST_COUNTER_BYTES))
    left = made[blocks.outlive_span(made)]
    found = [Counter(each.tolist()) for each in groups(sizes[left], blocks.spans[left])]
    # a library's workspace stays after the first pass alone
    return found[-1] & found[-2] if len(found) > 1 else Counter()


# a few tensors can have the sizes of weights by chance
_LEAST_BLOCKS = 4
_LEAST_SHARE = 0.9


class WeightCopies(BlockFinder):
    """Blocks that a call site allocates outside of all passes, one for each weight.

    Args:
        lasting: whether each block is alive when a later forward pass runs.
        weights: the sizes of the live weights, and how many have each.

    Attributes:
        equal: whether each block is one of as many as there are weights, of their sizes.
        doubled: the same with twice the bytes: fp32 next to 16-bit weights.
        trains_doubled: whether the optimizer's states have twice the bytes of the weights, so that it steps copies in
            fp32.
        flat: whether each block is as large as all weights together, in 16 or 32 bit.
    """

    def __init__(self, blocks: DeviceBlocks, *, lasting: Flags, weights: Counter[int]) -> None:
        super().__init__(blocks)
        self._outside = blocks.in_phase(Phase.OUTSIDE)
        # a copy can take a second operator, whose result is dropped
        spans = number_pairs(blocks.spans + 1, lasting.astype(np.int64))
        self._groups = number_pairs(spans, blocks.call_sites.place_of)
        self._weights = weights
        self.equal, self.doubled = self._found(1), self._found(2)
        states = set(self._sizes[self._call_sites.matching(STATE)].tolist())
        largest = max(weights, default=0)
        self.trains_doubled = 2 * largest in states and largest not in states
        total_bytes = sum(size * count for size, count in weights.items())
        sizes = (total_bytes, 2 * total_bytes) if weights.total() >= _LEAST_BLOCKS else ()
        self.flat: Flags = self._outside & np.isin(self._sizes, sizes)

    def _found(self, factor: int) -> Flags:
        found: Flags = np.zeros(len(self._outside), dtype=bool)
        sizes = Counter({factor * size: count for size, count in self._weights.items()})
        needed_bytes = _LEAST_SHARE * sum(size * count for size, count in sizes.items())
        blocks = np.flatnonzero(self._outside & np.isin(self._sizes, list(sizes)))
        for group in groups(blocks, self._groups[blocks]):
            held = Counter(self._sizes[group].tolist())
            if len(group) >= _LEAST_BLOCKS and held <= sizes and sum(held.elements()) >= needed_bytes:
                found[group] = True
        return found


_HELD = (Phase.BUILD, Phase.OPTIMIZER, Phase.BACKWARD)
# a part that allocates less often in a pass is a head or an embedding, which backward may not need
_LEAST_LAYERS = 2
# adapters and new heads are smaller parts of the model that they are added to
_LEAST_SHARE_OF_MODEL = 0.25
_LAYER = re.compile(r"torch/nn/modules/(?!module|container)\w+\.py:")


class EarlierModels(BlockFinder):
    """Blocks of models that a later model has replaced.

    Attributes:
        blocks: whether each block is memory of an earlier model: weights, gradients, states of its optimizer.
        since: the event at which the build of the last model began; -1 if no model was built after another.
    """

    def __init__(self, blocks: DeviceBlocks) -> None:
        super().__init__(blocks)
        replayed, call_sites, phases = self._replayed, self._call_sites, self._phases
        self.blocks: Flags = np.zeros(len(self._codes), dtype=bool)
        self.since = self._last_build()
        if self.since < 0:
            return
        forward = np.flatnonzero(phases.codes == phase_code(Phase.FORWARD))
        live = replayed.live_at(int(forward[np.searchsorted(forward, self.since)]))
        of_stack = np.array([phase_code(site.stack.phase) for site in call_sites.sites], dtype=np.int64)
        is_older = live < len(replayed.older_blocks)
        codes = np.where(is_older, of_stack[call_sites.site_of[live]], self._codes[live])
        held = (replayed.allocated_by[live] < self.since) & are_codes_of(codes, *_HELD)
        built = live[(replayed.allocated_by[live] >= self.since) & (codes == phase_code(Phase.BUILD))]
        sizes, weights = self._sizes, live[held & (codes == phase_code(Phase.BUILD))]
        # a library's workspace stays too
        held &= (codes != phase_code(Phase.BACKWARD)) | np.isin(sizes[live], sizes[weights])
        is_whole = len(built) > 0 and sizes[built].sum() >= _LEAST_SHARE_OF_MODEL * sizes[weights].sum()
        is_new = is_older[held].all() or self._starts_optimizer(built)
        if is_whole and is_new and self._trains_no_more(weights, built) and self._runs_one_model():
            self.blocks[live[held]] = True

    def _last_build(self) -> int:
        starts = self._phases.span_starts
        codes = self._phases.codes[starts]
        builds, steps, forward = (
            np.flatnonzero(codes == phase_code(phase)) for phase in (Phase.BUILD, Phase.OPTIMIZER, Phase.FORWARD)
        )
        builds = builds[builds < forward.max(initial=-1)]
        if not len(builds):
            return -1
        # a model may be built in several spans
        last_step = int(steps[steps < builds[-1]].max(initial=-1))
        first = int(builds[builds > last_step][0])
        older = len(self._replayed.older_blocks)
        follows_older = 0 < older < len(self._codes) and self._codes[older] == phase_code(Phase.BUILD)
        return int(starts[first]) if last_step >= 0 or follows_older else -1

    def _starts_optimizer(self, built: Int64s) -> bool:
        """Whether an optimizer makes states as large as the built weights, as it does in its first step alone."""
        states = self._call_sites.matching(STATE) & (self._replayed.allocated_by >= self.since)
        return bool(2 * self._sizes[states].sum() >= self._sizes[built].sum())

    def _trains_no_more(self, weights: Int64s, built: Int64s) -> bool:
        """Whether backward leaves no more gradients of each size than the built model has weights."""
        gradients, counts = gradients_of_passes(self._device), Counter(self._sizes[built].tolist())
        return all(gradients[size] <= counts[size] for size in self._sizes[weights].tolist())

    def _runs_one_model(self) -> bool:
        """Whether one line runs a model after the last build, and backward uses each of its parts."""
        freed = self._replayed.freed_by
        used = (freed < 0) | (self._phases.codes_of(freed) == phase_code(Phase.BACKWARD))
        chosen = self._device.in_phase(Phase.FORWARD) & (self._replayed.allocated_by >= self.since)
        site_of = self._call_sites.site_of
        in_backward, counts = set(site_of[chosen & used].tolist()), np.bincount(site_of[chosen])
        passes = len(np.unique(self._spans[chosen]))
        layers: Counter[Hashable] = Counter()
        trained: set[Hashable] = set()
        lines: set[Hashable] = set()
        for site in set(site_of[chosen].tolist()):
            stack = self._call_sites.sites[site].stack
            parts = {stack.model_calls[:depth] for depth in (1, 2)}
            if site in in_backward:
                trained.update(parts)
            if _LAYER.search(stack.text) and stack.model_calls:
                lines.add(stack.script_calls)
                layers.update(dict.fromkeys(parts, int(counts[site])))
        return len(lines) == 1 and all(part in trained for part in layers if layers[part] >= _LEAST_LAYERS * passes)
