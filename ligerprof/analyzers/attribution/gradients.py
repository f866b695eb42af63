"""Find gradients that backward computes and drops: those cast to a weight's dtype, and those an optimizer applied."""

import re
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ligerprof.analyzers.attribution.call_sites import CallSite, CallSites, Mask
from ligerprof.analyzers.attribution.phases import EventPhases, phase_code
from ligerprof.roles import Phase
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.trace import Int64s

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
# kinds: casts of the gradient of a weight, of another gradient, gradients that an optimizer within backward applied,
# and blocks of an unfinished pass that it keeps
CAST, CAST_OF_OTHER, APPLIED, KEPT_SO_FAR = 1, 2, 4, 8


class Gradients:
    """Blocks of backward that the order of events shows to be gradients of weights, or not to be.

    Args:
        codes: `phase_code` of each block.
        spans: the span in which each block was allocated.
    """

    def __init__(
        self, replayed: Replay, call_sites: CallSites, phases: EventPhases, *, codes: Int64s, spans: Int64s
    ) -> None:
        self._replayed = replayed
        self._call_sites = call_sites
        self._phases = phases
        self._in_backward: Mask = codes == phase_code(Phase.BACKWARD)
        self._in_forward: Mask = codes == phase_code(Phase.FORWARD)
        self._spans = spans

    @cached_property
    def kinds(self) -> npt.NDArray[np.uint8]:
        """The kinds of each block, as the sum of their numbers."""
        kinds = np.zeros(len(self._in_backward), dtype=np.uint8)
        casts, casts_of_others = self._casts()
        kinds[casts] += CAST
        kinds[casts_of_others] += CAST_OF_OTHER
        kinds[self._applied()] += APPLIED
        kinds[self._kept_so_far()] += KEPT_SO_FAR
        return kinds

    def _applied(self) -> Int64s:
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
        applied: Int64s = blocks[(last_step >= made) & (last_step >= last_made)]
        return applied

    def _kept_so_far(self) -> Int64s:
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
        in_forward[number_of[self._in_forward]] = True
        dropped = of_pass[freed[of_pass] >= 0]
        lives = np.searchsorted(self._replayed.allocated_by, freed[dropped]) - dropped
        longest = np.full(len(numbers), len(freed), dtype=np.int64)
        longest[number_of[dropped]] = 0
        np.maximum.at(longest, number_of[dropped], lives)
        kept = of_pass[freed[of_pass] < 0]
        is_old = len(freed) - kept > longest[number_of[kept]]
        kept_blocks: Int64s = kept[is_old | ~in_forward[number_of[kept]]]
        return kept_blocks

    def _casts(self) -> tuple[Int64s, Int64s]:
        """Casts of gradients that products computed for their weight, and for their input.

        A cast's source has half or twice its size, and is freed as soon as the cast is made.
        """
        casts = np.flatnonzero(self._in_backward & self._at(_CAST))
        if not len(casts):
            return casts, casts
        freed, sizes = self._replayed.freed_by, self._replayed.requested_bytes
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

    def _at(self, node: re.Pattern[str]) -> Mask:
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
