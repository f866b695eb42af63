"""Derive the features of blocks: from their lifetime, their size, and the place that allocated them."""

import re
from collections.abc import Iterator
from functools import cached_property

import numpy as np

from ligerprof.analyzers.attribution import frames
from ligerprof.analyzers.attribution.gradients import (
    APPLIED,
    CAST,
    CAST_OF_OTHER,
    DDP_BUCKET,
    FSDP,
    KEPT_SO_FAR,
    Gradients,
    Partitions,
    Precedents,
    Reductions,
    is_by_product,
)
from ligerprof.analyzers.attribution.layers import CHECKPOINT_CALL, NESTED_CHECKPOINTS
from ligerprof.analyzers.attribution.phases import EventPhases, phase_code, phase_of_code
from ligerprof.analyzers.attribution.program import ProgramFrames
from ligerprof.analyzers.attribution.rules import BlockFeatures, Feature
from ligerprof.analyzers.attribution.stacks import CallSite, CallSites
from ligerprof.analyzers.attribution.weights import WeightCopies, Weights
from ligerprof.models.architectures import body_of_layer, is_attention, is_head, is_token_embedding
from ligerprof.roles import Phase
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.trace import Int64s, distinct, distinct_rows, is_among
from ligerprof.units import MIB

_WITHOUT_OUTPUT = re.compile(frames.TILED_LOSS, re.MULTILINE)
# cuBLAS's default workspace: 32 MiB on Hopper, 8.125 MiB elsewhere (ATen/cuda/CublasHandlePool.cpp)
_WORKSPACE_SIZES = frozenset({32 * MIB, 8519680})
_SMALL_SHARE = 10_000
# inputs of a linear layer, and bytes of a bias in 16 bit
_LEAST_INPUTS = 64
_LARGEST_BIAS = 2**17
# blocks at either end of a call that `_call` distinguishes
_ENDS_OF_CALL = 2
_SOFTMAX = re.compile(rf"functional\.py:softmax\n(?:.*\n)*?.*:{frames.EAGER_ATTENTION}$", re.MULTILINE)
_SCORE_NODES = re.compile(r"Softmax|Bmm|Mul|Add|ToCopy|Dropout")


class FeatureExtractor:
    """Features of a device's blocks, as seen from the blocks that are live at one moment.

    Args:
        program: what holds for the whole recording.
        moment: its live blocks determine the sizes of weights, and its allocated bytes the limit of small blocks.
    """

    def __init__(
        self, replayed: Replay, call_sites: CallSites, phases: EventPhases, *, program: ProgramFrames, moment: int
    ) -> None:
        self._replayed, self._call_sites, self._phases = replayed, call_sites, phases
        self._program, self._layers = program, program.layers
        self._peak_bytes = int(replayed.allocated_bytes[moment])
        self._sizes = replayed.requested_bytes
        self._allocated_by = replayed.allocated_by
        self._spans = phases.spans_of(replayed.allocated_by)
        self._codes = phases.codes_of(replayed.allocated_by)
        self._codes[: len(replayed.older_blocks)] = [*map(self._older_phase, range(len(replayed.older_blocks)))]
        # code without Python calls that is not backward: events of one phase may follow those of another
        unknown = [
            site.stamp is None and site.stack.phase is None and bool(site.stack.native) for site in call_sites.sites
        ]
        self._codes[np.array(unknown, dtype=bool)[call_sites.site_of]] = phase_code(None)
        self._in_forward = self._codes == phase_code(Phase.FORWARD)
        self._weights = Weights(replayed, call_sites, self._codes, moment)
        self._copies = WeightCopies(
            replayed, call_sites, phases, self._codes, lasting=program.feeds_pass, weights=self._weights.live_sizes
        )
        self._reductions = Reductions(replayed, call_sites, phases, self._codes, moment=moment)
        self._partitions = Partitions(replayed, call_sites)
        self._gradients = Gradients(replayed, call_sites, phases, codes=self._codes, spans=self._spans)
        self._precedents = Precedents(
            replayed, call_sites, phases, spans=self._spans, gradients=self._reductions.gradients
        )
        # a matrix after its bias: a small vector, which divides the matrix into the inputs of a layer
        before = np.concatenate([[1], self._sizes[:-1]]).clip(1)
        self._follows_bias = (self._sizes % before == 0) & (self._sizes // before >= _LEAST_INPUTS)
        self._follows_bias &= before <= _LARGEST_BIAS
        # a phase with calls has blocks without them, too: autograd's threads have none
        self._without_calls = call_sites.at(lambda site: site.stamp is not None and not site.has_calls)
        if self._without_calls.any():
            has_calls = call_sites.at(lambda site: site.has_calls)
            self._without_calls &= ~is_among(self._spans, distinct(self._spans[has_calls]))
        self._ends_of_steps = np.sort([phases.last_between_steps, phases.last_optimizer_end])
        self._site_features: dict[int, frozenset[Feature]] = {}
        self._sets_of_features: dict[frozenset[Feature], frozenset[Feature]] = {}

    def _older_phase(self, block: int) -> int:
        """The phase code of a block older than the recording; unknown for weights if the recording starts with a build.

        Those weights are of a program that ran before and kept its model, such as one that ran out of memory.
        """
        phase = self._call_sites.of(block).stack.phase
        recorded = len(self._replayed.older_blocks)
        starts_with_build = recorded < len(self._codes) and self._codes[recorded] == phase_code(Phase.BUILD)
        return phase_code(None if phase is Phase.BUILD and starts_with_build else phase)

    def features(self, block: int) -> BlockFeatures:
        """The features of one block."""
        site, phase = self._call_sites.of(block), phase_of_code(int(self._codes[block]))
        features = {feature for feature, holds in self._of_block(block, site, phase) if holds}
        return BlockFeatures(
            phase=phase,
            stack=site.stack.text,
            inner_stack=site.stack.inner_text,
            native=site.stack.native_text,
            node=site.node,
            module=site.module,
            features=self._of_site(block, site) | self._of_size(int(self._sizes[block])) | features,
        )

    def signatures(self, blocks: Int64s) -> tuple[Int64s, list[tuple[int, ...]], Int64s]:
        """Find blocks with equal features.

        Returns:
            The first block of each kind, a key for each kind, and the kind of each block. Kinds with equal keys have
            equal features, also in other calls.
        """
        freed = self._replayed.freed_by[blocks]
        kept = freed < 0
        freed_span = np.where(kept, self._phases.last_span, self._phases.spans_of(freed))
        spans, allocated = self._spans[blocks], self._allocated_by[blocks]
        index, count = self._call_sites.index_in_call[blocks], self._call_sites.blocks_in_call[blocks]
        columns = (
            self._call_sites.site_of[blocks],
            self._size_kinds[blocks],
            self._codes[blocks],
            kept,
            np.sign(freed_span - spans),
            np.searchsorted(self._ends_of_steps, allocated, side="right"),
            ~kept & (freed < self._call_sites.next_call[blocks]),
            # all that the place in the call contributes: a call can allocate every block of a recording
            np.minimum(index, _ENDS_OF_CALL),
            np.minimum(count - index, _ENDS_OF_CALL + 1),
            self._follows_bias[blocks],
            is_among(blocks, self._first_workspaces),
            self._layers[blocks] < self._deepest_layer[spans],
            self._last_checkpointed[spans] <= blocks,
            self._reductions.gradients[blocks],
            self._reductions.inputs[blocks],
            self._partitions.gradients[blocks],
            self._gradients.kinds[blocks],
            self._precedents.kept[blocks],
            self._precedents.dropped[blocks],
            self._partitions.flat_weights[blocks],
            self._partitions.master_copies[blocks],
            self._program.vocabulary.follows_head[blocks],
            self._program.vocabulary.first_of_size[blocks],
            self._program.cached[blocks],
            self._program.regions.selected[blocks],
            self._program.regions.inputs[blocks],
            self._program.regions.outside[blocks],
            self._program.feeds_pass[blocks],
            self._program.follows_pass[blocks],
            self._program.older_weights[blocks],
            self._program.older_models[blocks],
            self._copies.equal[blocks],
            self._copies.doubled[blocks],
            self._copies.flat[blocks],
            self._without_calls[blocks],
        )
        first, kinds = distinct_rows(columns)
        keys = zip(*(column[first].tolist() for column in columns), strict=True)
        return blocks[first], list(keys), kinds

    def phase_codes(self, blocks: Int64s) -> Int64s:
        """Code of the phase that allocated each block; the stack's phase for blocks older than the recording."""
        return self._codes[blocks]

    def _of_block(self, block: int, site: CallSite, phase: Phase | None) -> Iterator[tuple[Feature, bool]]:
        yield from self._lifetime(block)
        yield Feature.FIRST_WORKSPACE, block in self._first_workspaces
        yield from self._call(block, site)
        yield Feature.REDUCED, bool(self._reductions.gradients[block])
        yield Feature.REDUCTION_INPUT, bool(self._reductions.inputs[block])
        yield Feature.GRADIENT_PARTITION, bool(self._partitions.gradients[block])
        kinds = int(self._gradients.kinds[block])
        yield Feature.CAST_OF_GRADIENT, bool(kinds & CAST)
        yield Feature.CAST_OF_OTHER_GRADIENT, bool(kinds & CAST_OF_OTHER)
        yield Feature.APPLIED, bool(kinds & APPLIED)
        yield Feature.KEPT_SO_FAR, bool(kinds & KEPT_SO_FAR)
        yield Feature.FLAT_WEIGHTS, bool(self._partitions.flat_weights[block])
        yield Feature.MASTER_COPY, bool(self._partitions.master_copies[block])
        yield Feature.BUCKETS_HOLD_GRADIENTS, self._reductions.buckets_hold_gradients
        yield Feature.SELECTED, bool(self._program.regions.selected[block])
        yield Feature.REGION_INPUT, bool(self._program.regions.inputs[block])
        yield Feature.OUTSIDE_REGIONS, bool(self._program.regions.outside[block])
        yield Feature.IN_CACHE, bool(self._program.cached[block])
        yield Feature.FEEDS_PASS, bool(self._program.feeds_pass[block])
        yield Feature.FOLLOWS_PASS, bool(self._program.follows_pass[block])
        yield Feature.OLDER_WEIGHT, bool(self._program.older_weights[block])
        yield Feature.OLDER_MODEL, bool(self._program.older_models[block])
        yield Feature.STAMPED_WITHOUT_CALLS, bool(self._without_calls[block])
        yield Feature.COPIES_WEIGHTS, bool(self._copies.equal[block])
        doubled = bool(self._copies.doubled[block])
        yield Feature.MASTER_OF_WEIGHTS, doubled and self._copies.trains_doubled
        yield Feature.LIKE_WEIGHTS, doubled or bool(self._copies.equal[block] or self._copies.flat[block])
        yield Feature.FIRST_COPY, bool(self._program.vocabulary.first_of_size[block])
        if int(self._sizes[block]) in self._score_sizes:
            in_backward = phase is Phase.BACKWARD and _SCORE_NODES.search(site.node) is not None
            in_attention = not site.module or is_attention(site.module)
            yield Feature.ATTENTION_SCORES, frames.EAGER_ATTENTION in site.stack.text or (in_backward and in_attention)
        if phase is not Phase.FORWARD and not self._has_modules(site):
            return
        if self._has_modules(site):
            in_loss_area = bool(self._program.vocabulary) and site.module in self._loss_modules
            yield Feature.IN_LOSS_AREA, in_loss_area
            # V is unknown, but the names of modules delimit the loss
            yield Feature.VOCABULARY_SIZED, in_loss_area and phase in (Phase.FORWARD, Phase.BACKWARD)
        else:
            yield Feature.IN_LOSS_AREA, bool(self._program.vocabulary.follows_head[block])
            # without module names: after all layers if no checkpointed layer allocates later in the span
            yield Feature.AFTER_LAYERS, bool(self._last_checkpointed[self._spans[block]] <= block)

    def _lifetime(self, block: int) -> Iterator[tuple[Feature, bool]]:
        freed, span = int(self._replayed.freed_by[block]), int(self._spans[block])
        freed_span = int(self._phases.spans[freed]) if freed >= 0 else None
        yield Feature.NEVER_FREED, freed_span is None
        yield Feature.DIES_IN_PHASE, freed_span == span
        outlives_phase = (self._phases.last_span if freed_span is None else freed_span) > span
        # an optimizer step has ended if torch noted so
        if self._codes[block] == phase_code(Phase.OPTIMIZER) and freed_span is None:
            outlives_phase |= bool(self._allocated_by[block] < self._phases.last_optimizer_end)
        yield Feature.OUTLIVES_PHASE, outlives_phase
        yield Feature.UNFINISHED, freed_span is None and not outlives_phase
        yield Feature.KEPT_BEFORE, bool(self._precedents.kept[block])
        yield Feature.DROPPED_BEFORE, bool(self._precedents.dropped[block])
        # a recording can end within forward: the block then outlives its layer if a later layer has begun
        in_later_layer = freed_span is None and bool(self._layers[block] < self._deepest_layer[span])
        # the region around it may not have ended
        in_later_layer = in_later_layer and not NESTED_CHECKPOINTS.search(self._call_sites.of(block).stack.text)
        yield Feature.OUTLIVES_LAYER, outlives_phase or in_later_layer
        yield Feature.DIES_IN_CALL, 0 <= freed < int(self._call_sites.next_call[block])

    def _of_size(self, size: int) -> frozenset[Feature]:
        return frozenset(feature for feature, holds in self._size(size) if holds)

    def _size(self, size: int) -> Iterator[tuple[Feature, bool]]:
        yield Feature.WEIGHT_SIZED, size in self._weights.sizes
        yield Feature.UNLIKE_FORWARD, size not in self._forward_sizes
        yield Feature.UNLIKE_WEIGHTS, self._weights.excludes(size) and size not in self._reductions.gathered_sizes
        yield Feature.GATHERED_SIZED, size in self._reductions.gathered_sizes
        yield Feature.HALF_WEIGHT_SIZED, 2 * size in self._weights.sizes
        yield Feature.HEAD_WEIGHT_SIZED, size in self._weights.head_sizes
        yield Feature.SCORES_SIZED, size in self._program.score_sizes
        yield Feature.SMALL, size * _SMALL_SHARE < self._peak_bytes
        vocabulary = self._program.vocabulary
        yield Feature.LOGITS_SIZED, size in vocabulary.sizes
        yield Feature.SHIFTED_LOGITS_SIZED, vocabulary.is_shifted(size)
        yield Feature.VOCABULARY_SIZED, vocabulary.is_multiple(size)

    def _call(self, block: int, site: CallSite) -> Iterator[tuple[Feature, bool]]:
        """The block's place within its call: autocast casts arguments from the last to the first."""
        index, count = int(self._call_sites.index_in_call[block]), int(self._call_sites.blocks_in_call[block])
        yield Feature.BY_PRODUCT, is_by_product(site, index, count)
        if not site.is_known:
            return
        yield Feature.FIRST_OF_CALL, index == 0 and count > 1
        yield Feature.LAST_OF_CALL, index == count - 1 and count > 1
        yield Feature.ONLY_OF_CALL, count == 1
        # the input is the first argument of linear, and the second of the three of Conv1D's addmm
        cast_input = 1 if "pytorch_utils.py:forward" in site.stack.text else count - 2
        follows_bias = bool(self._follows_bias[block]) and index > 0
        yield Feature.CAST_ARGUMENT, index < count - 1 and (count == 2 or index != cast_input or follows_bias)

    def _of_site(self, block: int, site: CallSite) -> frozenset[Feature]:
        """Features that all blocks of a call site share."""
        number = int(self._call_sites.site_of[block])
        if number not in self._site_features:
            found = frozenset(feature for feature, holds in self._place(site) if holds)
            # most of thousands of sites have one of a few sets
            self._site_features[number] = self._sets_of_features.setdefault(found, found)
        return self._site_features[number]

    def _place(self, site: CallSite) -> Iterator[tuple[Feature, bool]]:
        stack, module = site.stack, site.module
        yield Feature.CHECKPOINTING, self._checkpointing
        yield Feature.RECOMPUTED, site.recomputes
        yield Feature.CASTS_GRADIENTS, self._casts_gradients
        yield Feature.VOCABULARY_LOSS, bool(self._program.vocabulary)
        yield Feature.IN_EMBEDDING, is_token_embedding(module) or "nn/modules/sparse.py:forward" in stack.text
        if self._has_modules(site):
            yield Feature.IN_LAYER, site.layer is not None
            yield Feature.AFTER_LAYERS, site.layer is not None and site.layer == self._last_layer
            yield Feature.IN_MODEL_BODY, module in self._bodies
            yield Feature.IN_HEAD, is_head(module)
        else:
            yield Feature.IN_LAYER, CHECKPOINT_CALL.search(stack.text) is not None
            yield Feature.IN_MODEL_BODY, len(stack.model_calls) == 2 and not stack.below_model
            yield Feature.IN_HEAD, stack.in_head

    def _has_modules(self, site: CallSite) -> bool:
        return site.stamp is not None and len(self._modules) > 1

    @cached_property
    def _first_workspaces(self) -> frozenset[int]:
        """The first block of each phase and thread that may be cuBLAS's: never freed, after a product's output, if any.

        The order of blocks from before the recording is unknown: of these, a phase's only one counts.
        """
        first: dict[tuple[int, bool], int] = {}
        build, backward = phase_code(Phase.BUILD), phase_code(Phase.BACKWARD)
        sizes, size_of = self._call_sites.sizes
        is_sized = is_among(sizes, _WORKSPACE_SIZES)[size_of]
        by_wrapper = self._call_sites.matching_inner(FSDP)
        sized = np.flatnonzero(is_sized & (self._replayed.freed_by < 0) & ~by_wrapper)
        older = sized[sized < len(self._replayed.older_blocks)]
        phases, indices, counts = np.unique(self._codes[older], return_index=True, return_counts=True)
        for phase, index in zip(phases[counts == 1].tolist(), indices[counts == 1].tolist(), strict=True):
            first[phase, True] = int(older[index])
        follows = (self._call_sites.index_in_call > 0) | self._call_sites.matching(_WITHOUT_OUTPUT)
        for block in sized[follows[sized]].tolist():
            phase = int(self._codes[block])
            stack = self._call_sites.of(block).stack
            # autograd's threads, which a loss may use within forward, have no Python calls
            in_product = stack.in_linear or phase == backward
            if in_product or self._allocated_by[block] < self._phases.last_between_steps:
                first.setdefault((phase, bool(stack.calls)), block)
        if any(phase != build and called for phase, called in first):
            # the build runs no product, or not the first one; a weight can be as large
            first.pop((build, True), None)
        return frozenset(first.values())

    @cached_property
    def _deepest_layer(self) -> Int64s:
        """The last layer that began in each span; the last entry covers the time before the recording."""
        known = np.flatnonzero((self._layers >= 0) & (self._spans >= 0))
        return self._highest_by_span(known, self._layers[known])

    @cached_property
    def _forward_sizes(self) -> frozenset[int]:
        return frozenset(self._sizes[self._in_forward & ~self._call_sites.matching_inner(DDP_BUCKET)].tolist())

    @cached_property
    def _score_sizes(self) -> frozenset[int]:
        """Sizes of eager attention's score matrices, in either precision."""
        sizes = set(self._sizes[self._in_forward & self._call_sites.matching(_SOFTMAX)].tolist())
        return frozenset(sizes | {2 * size for size in sizes} | {size // 2 for size in sizes})

    @cached_property
    def _size_kinds(self) -> Int64s:
        """A number for each block; equal for sizes that have the same features."""
        sizes, size_of = self._call_sites.sizes
        numbers: dict[object, int] = {}
        kinds = ((self._of_size(size), size in self._score_sizes) for size in sizes.tolist())
        of_size = [numbers.setdefault(kind, len(numbers)) for kind in kinds]
        return np.array(of_size, dtype=np.int64)[size_of]

    @cached_property
    def _last_checkpointed(self) -> Int64s:
        """The last block that a checkpointed layer allocated in each span of forward, else -1."""
        blocks = np.flatnonzero(self._in_forward & self._call_sites.matching(CHECKPOINT_CALL))
        return self._highest_by_span(blocks, blocks)

    def _highest_by_span(self, blocks: Int64s, values: Int64s) -> Int64s:
        """The highest value of the blocks allocated in each span, else -1."""
        highest = np.full(self._phases.last_span + 2, -1, dtype=np.int64)
        np.maximum.at(highest, self._spans[blocks], values)
        return highest

    @cached_property
    def _checkpointing(self) -> bool:
        return any(
            site.recomputes or CHECKPOINT_CALL.search(site.stack.text) is not None for site in self._call_sites.sites
        )

    @cached_property
    def _casts_gradients(self) -> bool:
        """Whether backward casts gradients, as autocast's casts of weights make it do."""
        return any(site.node.startswith("ToCopyBackward") for site in self._call_sites.sites)

    @cached_property
    def _modules(self) -> frozenset[str]:
        return frozenset(site.module for site in self._call_sites.sites if site.stamp)

    @cached_property
    def _last_layer(self) -> int:
        return max((site.layer for site in self._call_sites.sites if site.layer is not None), default=-1)

    @cached_property
    def _bodies(self) -> frozenset[str]:
        """Modules that hold the decoder layers."""
        return frozenset(body for module in self._modules if (body := body_of_layer(module)) is not None)

    @cached_property
    def _loss_modules(self) -> frozenset[str]:
        """The head, the modules around it, and the loss."""
        heads = [module for module in self._modules if is_head(module)]
        around = {".".join(head.split(".")[:depth]) for head in heads for depth in range(head.count(".") + 2)}
        return frozenset({"", "loss"} | around) - self._bodies
