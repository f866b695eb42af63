"""Find gradients: those that backward drops or keeps, those that a wrapper reduces, and ZeRO's partitions."""

import re
from functools import cached_property

import numpy as np

from ligerprof.analyzers.attribution import frames
from ligerprof.analyzers.attribution.phases import BlockFinder, DeviceBlocks, phase_code
from ligerprof.analyzers.attribution.stacks import CallSite
from ligerprof.roles import Phase
from ligerprof.snapshots.trace import Flags, Int64s, number_pairs, runs

_CAST = re.compile(r"^ToCopyBackward")
_PRODUCT = re.compile(r"^B?[Mm]mBackward")
_PRODUCT_WITH_BIAS = re.compile(r"^AddmmBackward")
_NORM = re.compile(r"^\w*NormBackward")
# a node written in Python; its own allocations have Python calls
_PYTHON_NODE = "PyNode"
_COPIED_INPUT = re.compile(r"_inductor/cudagraph_trees\.py:_allocate_and_copy_recording_inputs$", re.MULTILINE)
_SUM = re.compile(r"^at::_ops::sum_dim_IntList::", re.MULTILINE)
# events after a cast's allocation at which its source may be freed
_EVENTS_TO_SOURCE = 3


class Gradients(BlockFinder):
    """Blocks of backward that the order of events shows to be gradients of weights, or not to be."""

    def __init__(self, blocks: DeviceBlocks) -> None:
        super().__init__(blocks)
        self._in_backward = blocks.in_phase(Phase.BACKWARD)

    def applied(self) -> Int64s:
        """Blocks that an optimizer's step within backward was the last to use: hooks step as gradients are made."""
        freed, phases = self._replayed.freed_by, self._phases
        steps = np.flatnonzero(phases.codes == phase_code(Phase.OPTIMIZER))
        # a step may move no memory
        steps = np.append(steps, phases.optimizer_starts[phases.optimizer_starts > 0] - 1)
        is_pass = phases.codes[phases.span_starts] == phase_code(Phase.BACKWARD)
        steps = np.sort(steps[is_pass[phases.spans[steps]]]).astype(np.int64)
        if not len(steps):
            return steps
        blocks = np.flatnonzero(self._in_backward & (freed >= 0))
        blocks = blocks[phases.spans_of(freed[blocks]) == self._spans[blocks]]
        of_backward = self._replayed.allocated_by[self._in_backward]
        ends, made = freed[blocks], self._replayed.allocated_by[blocks]
        last_step = np.append(-1, steps)[np.searchsorted(steps, ends)]
        last_made = np.append(-1, of_backward)[np.searchsorted(of_backward, ends)]
        return blocks[(last_step >= made) & (last_step >= last_made)]

    def kept_so_far(self) -> Int64s:
        """Blocks of an unfinished pass that are never freed, in contrast to the gradients of activations.

        These have sizes of a forward pass, and live briefly: a block is kept if none of them is as large, or if it has
        lived longer than all blocks of its size that the pass dropped.
        """
        freed = self._replayed.freed_by
        of_pass = np.flatnonzero(self._in_backward & (self._spans == self._phases.last_span))
        if not len(of_pass):
            return of_pass
        numbers, number_of = self._call_sites.sizes
        in_forward = np.zeros(len(numbers), dtype=bool)
        in_forward[number_of[self._device.in_phase(Phase.FORWARD)]] = True
        dropped = of_pass[freed[of_pass] >= 0]
        lives = np.searchsorted(self._replayed.allocated_by, freed[dropped]) - dropped
        longest = np.full(len(numbers), len(freed), dtype=np.int64)
        longest[number_of[dropped]] = 0
        np.maximum.at(longest, number_of[dropped], lives)
        kept = of_pass[freed[of_pass] < 0]
        is_old = len(freed) - kept > longest[number_of[kept]]
        return kept[is_old | ~in_forward[number_of[kept]]]

    def casts(self) -> tuple[Int64s, Int64s]:
        """Casts of gradients that products computed for their weight, and for their input.

        A cast's source has half or twice its size, and is freed as soon as the cast is made.
        """
        casts = np.flatnonzero(self._in_backward & self._at(_CAST))
        if not len(casts):
            return casts, casts
        freed, sizes = self._replayed.freed_by, self._sizes
        events = len(self._replayed.trace)
        allocated = np.append(self._replayed.allocated_by, events)
        freed_at = np.full(events + _EVENTS_TO_SOURCE + 1, -1, dtype=np.int64)
        dropped = np.flatnonzero(freed >= 0)
        freed_at[freed[dropped]] = dropped
        index, count = self._call_sites.index_in_call, self._call_sites.blocks_in_call
        with_bias = self._at(_PRODUCT_WITH_BIAS)
        in_product = (self._at(_PRODUCT) | with_bias) & (count > 1)
        is_first, is_last = index == 0, index == count - 1
        of_weights, of_inputs = (np.zeros(len(casts), dtype=bool) for _ in range(2))
        for place in range(1, _EVENTS_TO_SOURCE + 1):
            source = freed_at[allocated[casts] + place]
            is_source = (source >= 0) & (source < casts) & (allocated[casts] + place < allocated[casts + 1])
            is_source &= (2 * sizes[source] == sizes[casts]) | (sizes[source] == 2 * sizes[casts])
            is_source &= in_product[source]
            # with a bias, the product computes the input's gradient first
            for_weight = np.where(with_bias[source], is_last[source], is_first[source])
            for_input = np.where(with_bias[source], is_first[source], is_last[source])
            of_weights |= is_source & for_weight
            of_inputs |= is_source & for_input
        return casts[of_weights & ~of_inputs], casts[of_inputs]

    def _at(self, node: re.Pattern[str]) -> Flags:
        return self._call_sites.at(lambda site: node.match(site.node) is not None)


def is_by_product(site: CallSite, index: int, count: int) -> bool:
    """Whether a call of backward computes a weight's gradient with another block than this one.

    Norms, and products with a bias, compute the gradient of their input first, other products last. A sum allocates a
    buffer after its result. Autograd itself fills gradients of outputs that were not used with zeros, and a captured
    graph copies its inputs.
    """
    if (site.node == _PYTHON_NODE and not site.stack.calls) or _COPIED_INPUT.search(site.stack.text):
        return True
    if _NORM.match(site.node):
        return index == 0
    if _PRODUCT_WITH_BIAS.match(site.node):
        return index == 0 and count > 1
    return index > 0 and (_PRODUCT.match(site.node) or _SUM.search(site.stack.native_text)) is not None


_NONE = np.empty(0, dtype=np.int64)

FSDP = re.compile(frames.FSDP)
_REDUCTION = re.compile(f"{frames.FSDP2_REDUCTION}|{frames.FSDP2_ACCUMULATION}|{frames.FSDP1_REDUCTION}", re.MULTILINE)
# FSDP2 allocates the input and the output of each reduction with the same function, or in old versions by itself
_REDUCTION_BUFFERS = (
    re.compile(rf"\A\S*:allocate\n\S*{frames.FSDP2_REDUCTION}", re.MULTILINE),
    re.compile(rf"\A\S*{frames.FSDP2_REDUCTION}", re.MULTILINE),
)
_ACCUMULATION = re.compile(frames.FSDP2_ACCUMULATION, re.MULTILINE)
# the same functions and those that add gradients of several micro-batches, as frames of an event that frees
_DROPS = re.compile(r"_fsdp_param_group\.py:post_backward$|fsdp/_runtime_utils\.py:_post_backward_hook$", re.MULTILINE)
DDP_BUCKET = re.compile(frames.DDP_BUCKET, re.MULTILINE)
# FSDP1's gathered flat parameters; their gradients have the same sizes
_FLAT = re.compile(r"fsdp/_flat_param\.py:_alloc_padded_unsharded_flat_param$", re.MULTILINE)
_FSDP2_GATHERED = re.compile(frames.FSDP2_GATHERED, re.MULTILINE)
_GATHERED = re.compile(
    r"_fsdp_param\.py:(?:alloc_storage|init_all_gather_outputs)$|runtime/zero/partition_parameters\.py:", re.MULTILINE
)
# gradients of activations can be as large as weights, and are dropped anyhow
_DROPPED_RATIO, _LEAST_DROPPED = 4, 2
# padding to a multiple of the ranks is at most this share of a buffer
_PADDING_SHARE = 64


class Reductions(BlockFinder):
    """What wrappers such as FSDP and DDP do with the gradients that autograd computes.

    Args:
        moment: at which `buckets_hold_gradients` holds.

    Attributes:
        gathered_sizes: sizes of gathered weights, which are those of their gradients.
    """

    def __init__(self, blocks: DeviceBlocks, *, moment: int) -> None:
        super().__init__(blocks)
        self._moment = moment
        sites = blocks.call_sites
        # blocks of backward, except those of recomputed forward passes and of the wrappers
        computed = sites.at(lambda site: not site.recomputes) & ~sites.matching_inner(FSDP)
        self._by_autograd: Flags = computed & blocks.in_phase(Phase.BACKWARD)
        self._reducing = sites.matching_inner(_REDUCTION)
        # the first of consecutive blocks that reductions allocate
        self._run_starts: Flags = self._reducing & ~np.append(False, self._reducing[:-1])
        self.gathered_sizes = frozenset(self._sizes[sites.matching_inner(_GATHERED)].tolist())

    @cached_property
    def inputs(self) -> Flags:
        """The blocks into which FSDP2 copies gradients before it reduces them; each reduction then makes an output."""
        found = (np.flatnonzero(self._call_sites.matching_inner(pattern)) for pattern in _REDUCTION_BUFFERS)
        buffers = next((blocks for blocks in found if len(blocks)), _NONE)
        runs = np.cumsum(self._run_starts)[buffers]
        place_in_run = np.arange(len(buffers)) - np.searchsorted(runs, runs)
        return self._mask(buffers[place_in_run % 2 == 0])

    @cached_property
    def gradients(self) -> Flags:
        """Blocks that autograd computed and the wrapper reduced, and the blocks that were added or joined into them."""
        reduced = self._freed_in_reduction() | self._freed_before_reshard() | self._freed_by_wrapper() | self._flat()
        freed = self._replayed.freed_by
        outlives = np.where(freed < 0, self._phases.last_span, self._phases.spans_of(freed)) > self._spans
        return reduced | self._terms(reduced | (self._by_autograd & outlives))

    @cached_property
    def buckets_hold_gradients(self) -> bool:
        """Whether DDP's buckets are the only memory of the gradients (`gradient_as_bucket_view=True`).

        When the optimizer starts, gradients exist: if no other block can hold them, the buckets do. Where the recording
        ends before that, backward has dropped most blocks of the sizes of weights, instead of keeping them. Without
        synchronization, micro-batches make gradients of their own; the buckets hold none until the last micro-batch.
        """
        buckets = np.flatnonzero(self._call_sites.matching_inner(DDP_BUCKET))
        if not len(buckets):
            return False
        sizes, freed = self._sizes, self._replayed.freed_by
        built = sizes[self._device.in_phase(Phase.BUILD)]
        of_weights = np.flatnonzero(self._by_autograd & np.isin(sizes, built))
        if self._holds_own(of_weights, buckets, self._moment):
            return False
        step = self._first_step_after_backward
        if step is None:
            kept = freed[of_weights] < 0
            if np.count_nonzero(~kept) < _LEAST_DROPPED:
                return False
            return int(sizes[of_weights[kept]].sum()) * _DROPPED_RATIO < int(sizes[of_weights[~kept]].sum())
        return not self._holds_own(of_weights, buckets, step)

    def _holds_own(self, gradients: Int64s, buckets: Int64s, moment: int) -> bool:
        """Whether the gradients that are live at a moment are half as many bytes as the live buckets."""
        live = self._replayed.live_at(moment)
        own, held = (int(self._sizes[blocks[np.isin(blocks, live)]].sum()) for blocks in (gradients, buckets))
        return 2 * own >= held

    @cached_property
    def _first_step_after_backward(self) -> int | None:
        """The event that begins an optimizer step after a backward pass."""
        backward = np.flatnonzero(self._phases.codes == phase_code(Phase.BACKWARD))
        if not len(backward):
            return None
        optimizer = np.flatnonzero(self._phases.codes == phase_code(Phase.OPTIMIZER))
        starts = np.sort(np.append(optimizer, self._phases.optimizer_starts))
        after = starts[starts > backward[0]]
        return int(after[0]) if len(after) else None

    def _freed_in_reduction(self) -> Flags:
        """Blocks of autograd that were freed between the allocations of one reduction, and the last one after them."""
        found = np.zeros_like(self._by_autograd)
        if not self._reducing.any():
            return found
        freed, sizes = self._replayed.freed_by, self._sizes
        candidates = np.flatnonzero(self._by_autograd & (freed >= 0))
        candidates = candidates[np.argsort(freed[candidates])]
        begins = self._run_starts | self.inputs | self._call_sites.matching_inner(_ACCUMULATION)
        starts = np.flatnonzero(begins)
        ends = np.flatnonzero(self._reducing & ~np.append((self._reducing & ~begins)[1:], False))
        allocated = np.append(self._replayed.allocated_by, len(self._replayed.trace))
        for first, end in zip(starts.tolist(), ends.tolist(), strict=True):
            moments = allocated[[first, end, end + 1]]
            start, stop, limit = np.searchsorted(freed[candidates], moments).tolist()
            dropped = candidates[start:stop]
            found[dropped] = True
            # Python's loop variable holds the last gradient until the function returns
            if stop < limit and _completes(int(sizes[first]), int(sizes[dropped].sum()), int(sizes[candidates[stop]])):
                found[candidates[stop]] = True
        return found

    def _freed_before_reshard(self) -> Flags:
        """Blocks of autograd that were freed right before as many gathered weights of their sizes.

        FSDP2 adds a later micro-batch's gradients to the accumulated ones before it frees the gathered weights.
        """
        found = np.zeros_like(self._by_autograd)
        freed, sizes = self._replayed.freed_by, self._sizes
        is_gathered = self._call_sites.matching_inner(_FSDP2_GATHERED)
        if not is_gathered.any():
            return found
        order = np.flatnonzero(freed >= 0)
        order = order[np.argsort(freed[order])]
        gathered = is_gathered[order]
        edges = np.flatnonzero(np.diff(gathered, prepend=False, append=False))
        for start, end in edges.reshape(-1, 2).tolist():
            weights, before = order[start:end], order[max(2 * start - end, 0) : start]
            if len(before) == len(weights) and self._by_autograd[before].all():
                padding = sizes[weights] - sizes[before]
                found[before] = ((padding >= 0) & (padding * _PADDING_SHARE <= sizes[weights])).all()
        return found

    def _freed_by_wrapper(self) -> Flags:
        """Blocks of autograd whose release has the wrapper's frames, as recordings with `context="all"` contain."""
        chosen = np.flatnonzero(self._by_autograd & (self._replayed.freed_by >= 0) & self._reducing.any())
        codes, frames = self._replayed.trace.objects("frames")
        freed_at = codes[self._replayed.freed_by[chosen]]
        drops = {code for code in set(freed_at.tolist()) if _has_call(frames[code], _DROPS)}
        return self._mask(chosen[np.isin(freed_at, list(drops))])

    def _flat(self) -> Flags:
        """Blocks without Python frames that have the size of FSDP1's gathered flat parameters."""
        silent = self._call_sites.at(lambda site: not site.stack.calls)
        return silent & np.isin(self._sizes, self._sizes[self._call_sites.matching_inner(_FLAT)])

    def _terms(self, results: Flags) -> Flags:
        """Blocks that were added or joined into these: freed before anything else was allocated, and of fitting size.

        Gradients of a weight that the model uses twice are added. FSDP1 joins the gradients of a flat parameter.
        """
        freed, sizes, spans = self._replayed.freed_by, self._sizes, self._spans
        blocks = np.flatnonzero(self._by_autograd & (freed >= 0))
        latest = np.searchsorted(self._replayed.allocated_by, freed[blocks]) - 1
        # a variable that the next pass replaces lives longer
        candidates = (latest > blocks) & results[latest] & (spans[latest] == spans[blocks])
        blocks, latest = blocks[candidates], latest[candidates]
        total = np.bincount(latest, sizes[blocks], len(sizes))[latest]
        joined = (total <= sizes[latest]) & (total * _PADDING_SHARE > sizes[latest] * (_PADDING_SHARE - 1))
        return self._mask(blocks[joined | (sizes[blocks] == sizes[latest])])


def _completes(sent_bytes: int, known_bytes: int, last_bytes: int) -> bool:
    """Whether gradients fill the buffer that is sent, in their dtype or another, better with the last one."""
    missing = [
        min(abs(sent_bytes - ratio * gradient_bytes) for ratio in (0.5, 1, 2))
        for gradient_bytes in (known_bytes + last_bytes, known_bytes)
    ]
    return missing[0] < missing[1] and missing[0] * _PADDING_SHARE < sent_bytes


def _has_call(frames: object, pattern: re.Pattern[str]) -> bool:
    """Whether a list of frames, unchecked, has a call that matches."""
    listed = frames if isinstance(frames, list) else ()
    calls = (f"{frame.get('filename')}:{frame.get('name')}" for frame in listed if isinstance(frame, dict))
    return any(pattern.search(call) for call in calls)


_ZERO3_BUFFERS = re.compile(r"\A\S*zero/stage3\.py:_setup_for_real_optimizer$", re.MULTILINE)
_ZERO3_COPIES = re.compile(rf"zero/stage3\.py{frames.ZERO_MASTER_COPIES}", re.MULTILINE)
_CONSTRUCTOR = re.compile(frames.ZERO_CONSTRUCTOR, re.MULTILINE)
_FLATTEN = re.compile(rf"zero/stage_1_and_2\.py{frames.ZERO_FLATTEN}", re.MULTILINE)
# placeholders that take the place of weights while they are on the host
_PLACEHOLDER_BYTES = 16


class Partitions(BlockFinder):
    """The buffers of DeepSpeed's ZeRO optimizers.

    Attributes:
        flat_weights: ZeRO-1's and ZeRO-2's weights, flattened on the host and then moved to the GPU.
        master_copies: their copies of a rank's weights for the optimizer, with the 16-bit clones that precede them.
    """

    def __init__(self, blocks: DeviceBlocks) -> None:
        super().__init__(blocks)
        self.flat_weights, self.master_copies = self._constructed()

    @cached_property
    def gradients(self) -> Flags:
        """ZeRO-3's buffer for a rank's gradients: as many elements as the fp32 copies, in 16 or 32 bit.

        The bucket that the same function allocates has a size of its own.
        """
        found = self._call_sites.matching_inner(_ZERO3_BUFFERS)
        blocks = np.flatnonzero(found)
        copied = self._live_bytes(self._call_sites.matching_inner(_ZERO3_COPIES), self._replayed.allocated_by[blocks])
        sizes = self._sizes[blocks]
        found[blocks] = (sizes == copied) | (sizes == copied // 2)
        return found

    def _live_bytes(self, chosen: Flags, moments: Int64s) -> Int64s:
        """Requested bytes of the chosen blocks that are live at each moment."""
        sizes, freed = self._sizes[chosen], self._replayed.freed_by[chosen]
        order = np.argsort(freed, kind="stable")
        order = order[freed[order] >= 0]
        allocated = np.append(0, np.cumsum(sizes))[np.searchsorted(self._replayed.allocated_by[chosen], moments)]
        released = np.append(0, np.cumsum(sizes[order]))[np.searchsorted(freed[order], moments)]
        return allocated - released

    def _constructed(self) -> tuple[Flags, Flags]:
        """Flat weights and master copies: the constructor makes one of each per group of weights, in this order.

        Weights that were flattened on the GPU come from a function of their own. Last, offloading makes a buffer that
        moves the largest gradient to the host.
        """
        made, flattened = (self._call_sites.matching_inner(pattern) for pattern in (_CONSTRUCTOR, _FLATTEN))
        made &= self._sizes > _PLACEHOLDER_BYTES
        flat, copies = np.zeros_like(made), np.zeros_like(made)
        blocks = np.flatnonzero(made | flattened)
        calls = np.cumsum(self._call_sites.index_in_call == 0)[blocks]
        has_weights = False
        for of_call in runs(blocks, calls):
            if flattened[of_call[0]]:
                has_weights = True
            elif has_weights:
                copies[of_call] = True
                has_weights = False
            else:
                flat[of_call] = True
                has_weights = True
        # nothing was copied from the last one
        if has_weights and copies.any():
            flat[blocks[calls == calls[-1]]] = False
        return flat, copies


class Precedents(BlockFinder):
    """What became of blocks that earlier passes allocated at the same place, in the same size.

    Args:
        gradients: gradients that a wrapper reduced, which backward drops but had computed to keep.

    Attributes:
        kept: unfinished blocks whose precedents all outlived their pass.
        dropped: unfinished blocks whose precedents all died in their pass.
    """

    def __init__(self, blocks: DeviceBlocks, *, gradients: Flags) -> None:
        super().__init__(blocks)
        self._gradients = gradients
        self.kept, self.dropped = self._outcomes()

    def _outcomes(self) -> tuple[Flags, Flags]:
        """Whether each block of the last span that is never freed has precedents that were all kept, or all dropped.

        The precedents are those of the latest pass that has any, of passes with the same place in their step if there
        are some: the first one's gradients are kept, those of further micro-batches are added to them.
        """
        freed, last = self._replayed.freed_by, self._phases.last_span
        kept, dropped = np.zeros(len(freed), dtype=bool), np.zeros(len(freed), dtype=bool)
        unfinished = np.flatnonzero((self._spans == last) & (freed < 0))
        if not len(unfinished):
            return kept, dropped
        surroundings, sizes = self._call_sites.surroundings, self._sizes
        alike = np.isin(surroundings, surroundings[unfinished]) & np.isin(sizes, sizes[unfinished])
        earlier = np.flatnonzero(alike & (self._spans < last) & (self._spans >= 0))
        in_place = self._places_in_step[self._spans[earlier]] == self._places_in_step[last]
        earlier = earlier[in_place] if in_place.any() else earlier
        outlived = self._device.outlive_span(earlier) | self._gradients[earlier]
        both = np.append(earlier, unfinished)
        group_of = number_pairs(surroundings[both], self._call_sites.sizes[1][both])
        of_earlier, of_unfinished = group_of[: len(earlier)], group_of[len(earlier) :]
        # the first steps of a program may differ from the others
        latest = np.full(int(group_of.max()) + 1, -1, dtype=np.int64)
        np.maximum.at(latest, of_earlier, self._spans[earlier])
        in_latest = self._spans[earlier] == latest[of_earlier]
        outliving, blocks = (
            np.bincount(of_earlier[chosen], minlength=len(latest))[of_unfinished]
            for chosen in (in_latest & outlived, in_latest)
        )
        kept[unfinished] = (blocks > 0) & (outliving == blocks)
        dropped[unfinished] = (blocks > 0) & (outliving == 0)
        return kept, dropped

    @cached_property
    def _places_in_step(self) -> Int64s:
        """The number of backward passes since the last optimizer step, for each span."""
        codes = self._phases.codes[self._phases.span_starts]
        passes = np.cumsum(codes == phase_code(Phase.BACKWARD))
        before = np.maximum.accumulate(np.where(codes == phase_code(Phase.OPTIMIZER), passes, 0))
        return passes - before
