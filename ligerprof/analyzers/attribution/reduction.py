"""Find the gradients that a data-parallel wrapper reduces: by when they are freed, and where else none are kept."""

import re
from functools import cached_property

import numpy as np

from ligerprof.analyzers.attribution import frames
from ligerprof.analyzers.attribution.call_sites import CallSites, Mask
from ligerprof.analyzers.attribution.phases import EventPhases, phase_code
from ligerprof.roles import Phase
from ligerprof.snapshots.distinct import is_among
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.trace import Int64s

_NONE = np.empty(0, dtype=np.int64)

FSDP = re.compile(frames.FSDP)
_REDUCTION = re.compile(
    f"{frames.FSDP2_REDUCTION}|{frames.FSDP2_ACCUMULATION}|{frames.FSDP1_REDUCTION}",
    re.MULTILINE,
)
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


class Reductions:
    """What wrappers such as FSDP and DDP do with the gradients that autograd computes.

    Args:
        codes: `phase_code` of each block.
        moment: at which `buckets_hold_gradients` holds.
    """

    def __init__(
        self, replayed: Replay, call_sites: CallSites, phases: EventPhases, codes: Int64s, *, moment: int
    ) -> None:
        self._moment = moment
        self._replayed = replayed
        self._call_sites = call_sites
        self._phases = phases
        self._codes = codes

    @cached_property
    def inputs(self) -> Mask:
        """The blocks into which FSDP2 copies gradients before it reduces them; each reduction then makes an output."""
        found = (np.flatnonzero(self._call_sites.matching_inner(pattern)) for pattern in _REDUCTION_BUFFERS)
        buffers = next((blocks for blocks in found if len(blocks)), _NONE)
        runs = np.cumsum(self._run_starts)[buffers]
        place_in_run = np.arange(len(buffers)) - np.searchsorted(runs, runs)
        return _mask(buffers[place_in_run % 2 == 0], len(self._reducing))

    @cached_property
    def gradients(self) -> Mask:
        """Blocks that autograd computed and the wrapper reduced, and the blocks that were added or joined into them."""
        reduced = self._freed_in_reduction | self._freed_before_reshard | self._freed_by_wrapper | self._flat
        return reduced | self._terms(reduced | (self._by_autograd & self._outlives_backward))

    @cached_property
    def gathered_sizes(self) -> frozenset[int]:
        """Sizes of gathered weights, which are those of their gradients."""
        return frozenset(self._replayed.requested_bytes[self._call_sites.matching_inner(_GATHERED)].tolist())

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
        sizes, freed = self._replayed.requested_bytes, self._replayed.freed_by
        of_weights = np.flatnonzero(self._by_autograd & is_among(sizes, sizes[self._built]))
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
        sizes, live = self._replayed.requested_bytes, self._replayed.live_at(moment)
        own, held = (int(sizes[blocks[is_among(blocks, live)]].sum()) for blocks in (gradients, buckets))
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

    @cached_property
    def _built(self) -> Mask:
        return np.asarray(self._codes == phase_code(Phase.BUILD))

    @cached_property
    def _by_autograd(self) -> Mask:
        """Blocks of backward, except those of recomputed forward passes and of the wrappers."""
        computed = self._call_sites.at(lambda site: not site.recomputes) & ~self._call_sites.matching_inner(FSDP)
        return np.asarray(computed & (self._codes == phase_code(Phase.BACKWARD)))

    @cached_property
    def _reducing(self) -> Mask:
        return self._call_sites.matching_inner(_REDUCTION)

    @cached_property
    def _run_starts(self) -> Mask:
        """The first of consecutive blocks that reductions allocate."""
        return np.asarray(self._reducing & ~np.append(False, self._reducing[:-1]))

    @cached_property
    def _freed_in_reduction(self) -> Mask:
        """Blocks of autograd that were freed between the allocations of one reduction, and the last one after them."""
        found = np.zeros_like(self._by_autograd)
        if not self._reducing.any():
            return found
        freed, sizes = self._replayed.freed_by, self._replayed.requested_bytes
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

    @cached_property
    def _freed_before_reshard(self) -> Mask:
        """Blocks of autograd that were freed right before as many gathered weights of their sizes.

        FSDP2 adds a later micro-batch's gradients to the accumulated ones before it frees the gathered weights.
        """
        found = np.zeros_like(self._by_autograd)
        freed, sizes = self._replayed.freed_by, self._replayed.requested_bytes
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

    @cached_property
    def _freed_by_wrapper(self) -> Mask:
        """Blocks of autograd whose release has the wrapper's frames, as recordings with `context="all"` contain."""
        chosen = np.flatnonzero(self._by_autograd & (self._replayed.freed_by >= 0) & self._reducing.any())
        codes, frames = self._replayed.trace.objects("frames")
        freed_at = codes[self._replayed.freed_by[chosen]]
        drops = {code for code in set(freed_at.tolist()) if _has_call(frames[code], _DROPS)}
        found = np.zeros_like(self._by_autograd)
        found[chosen] = is_among(freed_at, drops)
        return found

    @cached_property
    def _flat(self) -> Mask:
        """Blocks without Python frames that have the size of FSDP1's gathered flat parameters."""
        sizes = self._replayed.requested_bytes
        silent = self._call_sites.at(lambda site: not site.stack.calls)
        return np.asarray(silent & is_among(sizes, sizes[self._call_sites.matching_inner(_FLAT)]))

    @cached_property
    def _outlives_backward(self) -> Mask:
        freed, spans = self._replayed.freed_by, self._phases.spans_of(self._replayed.allocated_by)
        return np.asarray(np.where(freed < 0, self._phases.last_span, self._phases.spans_of(freed)) > spans)

    def _terms(self, results: Mask) -> Mask:
        """Blocks that were added or joined into these: freed before anything else was allocated, and of fitting size.

        Gradients of a weight that the model uses twice are added. FSDP1 joins the gradients of a flat parameter.
        """
        freed, sizes = self._replayed.freed_by, self._replayed.requested_bytes
        blocks = np.flatnonzero(self._by_autograd & (freed >= 0))
        latest = np.searchsorted(self._replayed.allocated_by, freed[blocks]) - 1
        # a variable that the next pass replaces lives longer
        spans = self._phases.spans_of(self._replayed.allocated_by)
        candidates = (latest > blocks) & results[latest] & (spans[latest] == spans[blocks])
        blocks, latest = blocks[candidates], latest[candidates]
        total = np.bincount(latest, sizes[blocks], len(sizes))[latest]
        joined = (total <= sizes[latest]) & (total * _PADDING_SHARE > sizes[latest] * (_PADDING_SHARE - 1))
        return _mask(blocks[joined | (sizes[blocks] == sizes[latest])], len(freed))


def _mask(blocks: Int64s, count: int) -> Mask:
    mask = np.zeros(count, dtype=bool)
    mask[blocks] = True
    return mask


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
