"""Derive the features of blocks: from their lifetime, their size, and the place that allocated them."""

import re
from collections.abc import Iterator
from functools import cached_property

import numpy as np

from ligerprof.analyzers.attribution import frames
from ligerprof.analyzers.attribution.gradients import (
    DDP_BUCKET,
    FSDP,
    Gradients,
    Partitions,
    Precedents,
    Reductions,
    is_by_product,
)
from ligerprof.analyzers.attribution.layers import CHECKPOINT_CALL, NESTED_CHECKPOINTS, Regions, layers_in_passes
from ligerprof.analyzers.attribution.phases import GENERATE, BlockFinder, DeviceBlocks, phase_code, phase_of_code
from ligerprof.analyzers.attribution.rules import BlockFeatures, Feature
from ligerprof.analyzers.attribution.stacks import WRAPPERS, CallSite, CallSites
from ligerprof.analyzers.attribution.vocabulary import Vocabulary, is_look_up
from ligerprof.analyzers.attribution.weights import EarlierModels, WeightCopies, Weights, find_older_weights
from ligerprof.models.architectures import body_of_layer, is_attention, is_head, is_token_embedding
from ligerprof.roles import Phase
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.trace import Flags, Int64s, distinct_rows, groups, number_pairs
from ligerprof.units import MIB

_CACHE_LIBRARY = re.compile(r"^transformers/cache_utils\.py:", re.MULTILINE)
_STATIC_CACHE = re.compile(r"^transformers/cache_utils\.py:lazy_initialization$", re.MULTILINE)
# a program's own names for a buffer that it fills in place, such as `setup_caches` or `kv_cache.py`
_CACHE_NAME = re.compile(r"(?:\b|_)(?:kv_?)?caches?(?:\b|_)", re.IGNORECASE)
_OTHER_CACHE = re.compile(r"rope|rotary|freq|sincos|mask|position")
_FEWEST_PASSES = 3
# keys and values of two layers
_FEWEST_NAMED = 4
# a prompt is longer than the tokens that later passes decode
_LEAST_TOKENS_BEFORE = 8
_CONVERSIONS = frozenset({"convert", "<lambda>"})
# keys may be freed only once the values have been replaced too
_LATEST_REPLACEMENT = 2


def find_cached(blocks: DeviceBlocks) -> Flags:
    """Whether each block holds keys and values between the forward passes of a generation.

    Passes whose tensors a backward pass frees belong to training, where keys and values are saved for backward. Of
    the others, a block is cached

    - if transformers' cache allocated it during `generate()`, or as a buffer that it fills in place and keeps;
    - if it grows from pass to pass: every layer replaces its block by a larger one of the same call. What the first
      of these passes replaced, layer by layer, is cached too, such as the projection that the keys are views of;
    - if a program without backward creates four or more equal tensors in a function named after a cache and keeps
      them;
    - if such a program decodes tokens, and no other rule finds where keys and values are: the largest buffers that its
      build allocates in pairs.
    """
    replayed, call_sites, phases, spans = blocks.replayed, blocks.call_sites, blocks.phases, blocks.spans
    inferred = blocks.in_phase(Phase.FORWARD) & ~_trains(blocks)
    kept = (replayed.freed_by < 0) | (phases.spans_of(replayed.freed_by) != spans)
    cached = np.zeros(len(spans), dtype=bool)
    in_library = call_sites.matching(_CACHE_LIBRARY)
    if in_library.any():
        generates = call_sites.matching(GENERATE)
        in_place = call_sites.matching(_STATIC_CACHE)
        cached |= in_library & inferred & (generates | (in_place & kept))
        # beam search reorders it between passes
        cached |= in_library & generates & blocks.in_phase(Phase.OUTSIDE)
    for group in _growing(replayed, call_sites, inferred & ~cached):
        cached[group] = True
    if not (phases.codes == phase_code(Phase.BACKWARD)).any():
        cached |= _named(replayed, call_sites, kept & (spans < phases.last_span))
        if not cached.any() and _decodes(blocks):
            cached |= _paired(replayed, call_sites, kept & blocks.in_phase(Phase.BUILD))
    return cached


def _decodes(blocks: DeviceBlocks) -> bool:
    """Whether a pass looks far fewer tokens up than one before, as only a model can that keeps keys and values."""
    looked_up = np.flatnonzero(blocks.call_sites.at(is_look_up) & blocks.in_phase(Phase.FORWARD))
    sizes, spans = blocks.replayed.requested_bytes[looked_up], blocks.spans[looked_up]
    highest = np.append(0, np.maximum.accumulate(sizes))[np.searchsorted(spans, spans)]
    return bool((sizes * _LEAST_TOKENS_BEFORE <= highest).any())


def _paired(replayed: Replay, call_sites: CallSites, built: Flags) -> Flags:
    """The largest tensors that the build of a model allocates two at a time, apart from weights.

    They are buffers of its modules, or tensors that its own constructors make. `Module._apply` moves weights first
    and buffers last, from two lines.
    """
    sites = call_sites.sites
    lines = [_line_of_apply(site) for site in sites]
    last = max(lines, default=0) if len({line for line in lines if line}) > 1 else 0
    kinds = [
        line == last if line else not _first_call(site).startswith("torch/")
        for site, line in zip(sites, lines, strict=True)
    ]
    is_weight = built & ~np.array([*kinds, False], dtype=bool)[call_sites.site_of]
    sizes = replayed.requested_bytes
    blocks = np.flatnonzero(built & ~is_weight & ~np.isin(sizes, sizes[is_weight]))
    paired = np.zeros(len(built), dtype=bool)
    if not len(blocks):
        return paired
    largest = blocks[sizes[blocks] == sizes[blocks].max()]
    follows = np.diff(largest, prepend=-2) == 1
    if len(largest) >= _FEWEST_NAMED and (follows == (np.arange(len(largest)) % 2 == 1)).all():
        paired[largest] = True
    return paired


def _line_of_apply(site: CallSite) -> int:
    """The line of `Module._apply` that converts a tensor, 0 elsewhere."""
    calls = site.stack.calls[:2]
    converts = len(calls) > 1 and calls[0].function in _CONVERSIONS and calls[1].function == "_apply"
    return calls[1].line if converts else 0


def _first_call(site: CallSite) -> str:
    """The file of the innermost Python call that does more than forward to an operator."""
    return next((call.file for call in site.stack.calls if not WRAPPERS.search(call.file)), "torch/")


def _trains(blocks: DeviceBlocks) -> Flags:
    """Whether each block was allocated in a span that backward frees a block of, or at such a span's sites."""
    phases, call_sites, in_forward = blocks.phases, blocks.call_sites, blocks.in_phase(Phase.FORWARD)
    saved = in_forward & (phases.codes_of(blocks.replayed.freed_by) == phase_code(Phase.BACKWARD))
    is_saved_in = np.zeros(phases.last_span + 2, dtype=bool)
    is_saved_in[blocks.spans[saved]] = True
    in_span = is_saved_in[blocks.spans]
    in_site = np.zeros(len(call_sites.sites), dtype=bool)
    in_site[call_sites.site_of[in_span & in_forward]] = True
    return in_span | in_site[call_sites.site_of]


def _growing(replayed: Replay, call_sites: CallSites, candidates: Flags) -> Iterator[Int64s]:
    """Blocks that a call replaces by larger ones in each pass, and the blocks that the first pass replaced."""
    blocks = np.flatnonzero(candidates)
    for chain in _chains(replayed, call_sites, blocks):
        yield chain
        yield _replaced_by(replayed, call_sites, chain, blocks)


def _chains(replayed: Replay, call_sites: CallSites, blocks: Int64s) -> Iterator[Int64s]:
    """Blocks of one call site that grow from pass to pass and live until the next pass has replaced them."""
    for of_site in groups(blocks, call_sites.site_of[blocks]):
        if len(of_site) < _FEWEST_PASSES:
            continue
        growth = np.diff(replayed.requested_bytes[of_site])
        # a smaller block starts another generation
        for chain in np.split(of_site, np.flatnonzero(growth < 0) + 1):
            if _grows(replayed, call_sites, chain):
                yield chain


def _grows(replayed: Replay, call_sites: CallSites, chain: Int64s) -> bool:
    ends = np.append(np.flatnonzero(np.diff(replayed.requested_bytes[chain])) + 1, len(chain))
    layers = int(ends[0])
    counts = np.diff(ends, prepend=0)
    if len(counts) < _FEWEST_PASSES or layers < 2 or (counts[:-1] != layers).any() or counts[-1] > layers:
        return False
    replaced, replacing = chain[:-layers], chain[layers:]
    freed = replayed.freed_by[replaced]
    if (freed < replayed.allocated_by[replacing]).any():
        return False
    # a concatenation replaces its input by definition; of others, the replaced block is freed soon
    if "cat" in call_sites.of(int(chain[0])).stack.operators:
        return True
    latest = np.arange(len(replaced)) + layers + min(_LATEST_REPLACEMENT, layers - 1)
    known = latest < len(chain)
    return bool((freed[known] < replayed.allocated_by[chain[latest[known]]]).all())


def _replaced_by(replayed: Replay, call_sites: CallSites, chain: Int64s, blocks: Int64s) -> Int64s:
    """Blocks of an earlier pass that are freed while the first pass of a chain runs, layer by layer."""
    layers = int((replayed.requested_bytes[chain] == replayed.requested_bytes[chain[0]]).sum())
    start, stop = replayed.allocated_by[chain[0]], replayed.allocated_by[chain[layers]]
    freed = replayed.freed_by[blocks]
    earlier = blocks[(replayed.allocated_by[blocks] < start) & (freed > start) & (freed < stop)]
    group = number_pairs(call_sites.site_of[earlier], replayed.requested_bytes[earlier])
    return earlier[np.bincount(group)[group] >= 2]


def _named(replayed: Replay, call_sites: CallSites, kept: Flags) -> Flags:
    """Kept blocks of functions named after a cache, if one allocates keys and values of several layers."""
    functions = [_cache_function(site) for site in call_sites.sites]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(functions))}
    of_block = np.array([numbers[name] for name in functions], dtype=np.int64)[call_sites.site_of]
    blocks = np.flatnonzero(kept & (of_block != numbers.get("", -1)))
    group = number_pairs(of_block[blocks], replayed.requested_bytes[blocks])
    named = np.zeros(len(kept), dtype=bool)
    named[blocks[np.bincount(group)[group] >= _FEWEST_NAMED]] = True
    return named


def _cache_function(site: CallSite) -> str:
    """The function that creates a tensor, or an object that holds it, if it is named after a cache; else "".

    Tensors that a function only moves, or that a module of torch creates, do not count.
    """
    first = _first_call(site)
    if first.startswith(("torch/", "transformers/")):
        return ""
    own = (call for call in site.stack.calls if not WRAPPERS.search(call.file))
    calls = [call for call in own if call.function != "__init__"][:1]
    files = (first, *(call.file for call in calls))
    names = [*(call.function for call in calls), *(file.rpartition("/")[2].removesuffix(".py") for file in files)]
    named = any(_CACHE_NAME.search(name) and not _OTHER_CACHE.search(name) for name in names)
    return ":".join(names) if named else ""


class ProgramFrames:
    """Features of a recording's blocks that do not depend on the moment.

    Attributes:
        layers: decoder layer of each block if forward or backward shows it, else -1.
        earlier_models: blocks of models that the process built before the one that it trains.
        older_models: whether each block belongs to one of them and is older than the recording.
        older_weights: whether each block is a weight from before the recording.
        score_sizes: sizes of what a linear layer at the model's end returns, in 16 and 32 bit.
        cached: whether each block holds keys and values between the passes of a generation.
        feeds_pass: whether each block is alive when a later forward pass runs.
        follows_pass: whether each block was allocated after a forward pass, with no other phase in between.
        checkpointing: whether a call site checkpoints.
        casts_gradients: whether backward casts gradients, as autocast's casts of weights make it do.
        modules: names of all modules; `last_layer` is the highest layer in them.
        bodies: modules that hold the decoder layers.
        loss_modules: the head, the modules around it, and the loss.
    """

    def __init__(self, blocks: DeviceBlocks) -> None:
        replayed, phases = blocks.replayed, blocks.phases
        self.layers = layers_in_passes(blocks)
        self.regions = Regions(blocks, self.layers)
        self.earlier_models = EarlierModels(blocks)
        self.older_models: Flags = self.earlier_models.blocks & (replayed.allocated_by < 0)
        self.older_weights = find_older_weights(blocks)
        self.cached = find_cached(blocks)
        generates = bool(self.cached.any() or blocks.call_sites.matching(GENERATE).any())
        in_head = blocks.call_sites.at(lambda site: site.stack.in_head) & blocks.in_phase(Phase.FORWARD)
        sizes = set(replayed.requested_bytes[in_head].tolist())
        self.score_sizes = frozenset(sizes | {2 * size for size in sizes})
        self.vocabulary = Vocabulary(blocks, generates=generates)
        self.feeds_pass: Flags = phases.feeds_forward(replayed.allocated_by, replayed.freed_by)
        self.follows_pass: Flags = phases.follows_forward(replayed.allocated_by)
        sites = blocks.call_sites.sites
        self.checkpointing = any(site.recomputes or CHECKPOINT_CALL.search(site.stack.text) for site in sites)
        self.casts_gradients = any(site.node.startswith("ToCopyBackward") for site in sites)
        self.modules = frozenset(site.module for site in sites if site.stamp)
        self.last_layer = max((site.layer for site in sites if site.layer is not None), default=-1)
        self.bodies = frozenset(body for module in self.modules if (body := body_of_layer(module)) is not None)
        heads = [module for module in self.modules if is_head(module)]
        around = {".".join(head.split(".")[:depth]) for head in heads for depth in range(head.count(".") + 2)}
        self.loss_modules = frozenset({"", "loss"} | around) - self.bodies


_WITHOUT_OUTPUT = re.compile(frames.TILED_LOSS, re.MULTILINE)
# cuBLAS's default workspace: 32 MiB on Hopper, 8.125 MiB elsewhere (ATen/cuda/CublasHandlePool.cpp)
_WORKSPACE_SIZES = frozenset({32 * MIB, 8519680})
_SMALL_SHARE = 10_000
# inputs of a linear layer, and bytes of a bias in 16 bit
_LEAST_INPUTS = 64
_LARGEST_BIAS = 2**17
# blocks at either end of a call that `_call` distinguishes
_ENDS_OF_CALL = 2
_SOFTMAX = re.compile(rf"functional\.py:softmax\n(?:.*\n)*?.*{frames.EAGER_CALL}", re.MULTILINE)
_SCORE_NODES = re.compile(r"Softmax|Bmm|Mul|Add|ToCopy|Dropout")


class FeatureExtractor(BlockFinder):
    """Features of a device's blocks, as seen from the blocks that are live at one moment.

    Args:
        program: what holds for the whole recording.
        moment: its live blocks determine the sizes of weights, and its allocated bytes the limit of small blocks.
    """

    def __init__(self, blocks: DeviceBlocks, *, program: ProgramFrames, moment: int) -> None:
        super().__init__(DeviceBlocks(blocks.replayed, blocks.call_sites, blocks.phases, blocks.codes.copy()))
        replayed, call_sites, phases = self._replayed, self._call_sites, self._phases
        self._program, self._layers = program, program.layers
        self._peak_bytes = int(replayed.allocated_bytes[moment])
        self._allocated_by = replayed.allocated_by
        self._codes[: len(replayed.older_blocks)] = list(map(self._older_phase, range(len(replayed.older_blocks))))
        # code without Python calls that is not backward: events of one phase may follow those of another
        unknown = call_sites.at(lambda site: not (site.stamp or site.stack.phase) and len(site.stack.native) > 0)
        self._codes[unknown] = phase_code(None)
        self._in_forward = self._device.in_phase(Phase.FORWARD)
        of_buckets = self._call_sites.matching_inner(DDP_BUCKET)
        self._forward_sizes = frozenset(self._sizes[self._in_forward & ~of_buckets].tolist())
        self._weights = Weights(self._device, moment)
        self._copies = WeightCopies(self._device, lasting=program.feeds_pass, weights=self._weights.live_sizes)
        self._reductions = Reductions(self._device, moment=moment)
        self._partitions = Partitions(self._device)
        self._gradients = Gradients(self._device)
        self._precedents = Precedents(self._device, gradients=self._reductions.gradients)
        # a matrix after its bias: a small vector, which divides the matrix into the inputs of a layer
        before = np.concatenate([[1], self._sizes[:-1]]).clip(1)
        self._follows_bias = (self._sizes % before == 0) & (self._sizes // before >= _LEAST_INPUTS)
        self._follows_bias &= before <= _LARGEST_BIAS
        # a phase with calls has blocks without them, too: autograd's threads have none
        self._without_calls = call_sites.at(lambda site: site.stamp is not None and not site.has_calls)
        if self._without_calls.any():
            has_calls = call_sites.at(lambda site: site.has_calls)
            self._without_calls &= ~np.isin(self._spans, self._spans[has_calls])
        self._ends_of_steps = np.sort([phases.last_between_steps, phases.last_optimizer_end])
        self._site_features: dict[int, frozenset[Feature]] = {}

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
            np.isin(blocks, list(self._first_workspaces)),
            self._layers[blocks] < self._deepest_layer[spans],
            self._last_checkpointed[spans] <= blocks,
            self._program.vocabulary.follows_head[blocks],
            *(mask[blocks] for mask in self._masks.values()),
        )
        first, kinds = distinct_rows(columns)
        keys = zip(*(column[first].tolist() for column in columns), strict=True)
        return blocks[first], list(keys), kinds

    @cached_property
    def _masks(self) -> dict[Feature, Flags]:
        """Features that are known for all blocks at once."""
        program, copies, precedents = self._program, self._copies, self._precedents
        casts, casts_of_others = self._gradients.casts()
        return {
            Feature.REDUCED: self._reductions.gradients,
            Feature.REDUCTION_INPUT: self._reductions.inputs,
            Feature.GRADIENT_PARTITION: self._partitions.gradients,
            Feature.CAST_OF_GRADIENT: self._mask(casts),
            Feature.CAST_OF_OTHER_GRADIENT: self._mask(casts_of_others),
            Feature.APPLIED: self._mask(self._gradients.applied()),
            Feature.KEPT_SO_FAR: self._mask(self._gradients.kept_so_far()),
            Feature.KEPT_BEFORE: precedents.kept,
            Feature.DROPPED_BEFORE: precedents.dropped,
            Feature.FLAT_WEIGHTS: self._partitions.flat_weights,
            Feature.MASTER_COPY: self._partitions.master_copies,
            Feature.SELECTED: program.regions.selected,
            Feature.REGION_INPUT: program.regions.inputs,
            Feature.OUTSIDE_REGIONS: program.regions.outside,
            Feature.IN_CACHE: program.cached,
            Feature.FEEDS_PASS: program.feeds_pass,
            Feature.FOLLOWS_PASS: program.follows_pass,
            Feature.OLDER_WEIGHT: program.older_weights,
            Feature.OLDER_MODEL: program.older_models,
            Feature.STAMPED_WITHOUT_CALLS: self._without_calls,
            Feature.COPIES_WEIGHTS: copies.equal,
            Feature.MASTER_OF_WEIGHTS: copies.doubled & copies.trains_doubled,
            Feature.LIKE_WEIGHTS: copies.equal | copies.doubled | copies.flat,
            Feature.FIRST_COPY: program.vocabulary.first_of_size,
        }

    def phase_codes(self, blocks: Int64s) -> Int64s:
        """Code of the phase that allocated each block; the stack's phase for blocks older than the recording."""
        return self._codes[blocks]

    def _of_block(self, block: int, site: CallSite, phase: Phase | None) -> Iterator[tuple[Feature, bool]]:
        yield from self._lifetime(block)
        yield Feature.FIRST_WORKSPACE, block in self._first_workspaces
        yield from self._call(block, site)
        yield Feature.BUCKETS_HOLD_GRADIENTS, self._reductions.buckets_hold_gradients
        yield from ((feature, bool(mask[block])) for feature, mask in self._masks.items())
        if int(self._sizes[block]) in self._score_sizes:
            in_backward = phase is Phase.BACKWARD and _SCORE_NODES.search(site.node) is not None
            in_attention = not site.module or is_attention(site.module)
            yield Feature.ATTENTION_SCORES, frames.EAGER_ATTENTION in site.stack.text or (in_backward and in_attention)
        if phase is not Phase.FORWARD and not self._has_modules(site):
            return
        if self._has_modules(site):
            in_loss_area = bool(self._program.vocabulary) and site.module in self._program.loss_modules
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
            self._site_features[number] = frozenset(feature for feature, holds in self._place(site) if holds)
        return self._site_features[number]

    def _place(self, site: CallSite) -> Iterator[tuple[Feature, bool]]:
        stack, module = site.stack, site.module
        yield Feature.CHECKPOINTING, self._program.checkpointing
        yield Feature.RECOMPUTED, site.recomputes
        yield Feature.CASTS_GRADIENTS, self._program.casts_gradients
        yield Feature.VOCABULARY_LOSS, bool(self._program.vocabulary)
        yield Feature.IN_EMBEDDING, is_token_embedding(module) or "nn/modules/sparse.py:forward" in stack.text
        if self._has_modules(site):
            yield Feature.IN_LAYER, site.layer is not None
            yield Feature.AFTER_LAYERS, site.layer is not None and site.layer == self._program.last_layer
            yield Feature.IN_MODEL_BODY, module in self._program.bodies
            yield Feature.IN_HEAD, is_head(module)
        else:
            yield Feature.IN_LAYER, CHECKPOINT_CALL.search(stack.text) is not None
            yield Feature.IN_MODEL_BODY, len(stack.model_calls) == 2 and not stack.below_model
            yield Feature.IN_HEAD, stack.in_head

    def _has_modules(self, site: CallSite) -> bool:
        return site.stamp is not None and len(self._program.modules) > 1

    @cached_property
    def _first_workspaces(self) -> frozenset[int]:
        """The first block of each phase and thread that may be cuBLAS's: never freed, after a product's output, if any.

        The order of blocks from before the recording is unknown: of these, a phase's only one counts.
        """
        first: dict[tuple[int, bool], int] = {}
        build, backward = phase_code(Phase.BUILD), phase_code(Phase.BACKWARD)
        sizes, size_of = self._call_sites.sizes
        is_sized = np.isin(sizes, list(_WORKSPACE_SIZES))[size_of]
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
