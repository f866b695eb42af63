"""Find gradients that backward computes and drops: those cast to a weight's dtype, and those an optimizer applied."""

import re
from functools import cached_property

import numpy as np

from ligerprof.analyzers.attribution.call_sites import CallSites, Mask
from ligerprof.analyzers.attribution.phases import EventPhases, phase_code
from ligerprof.roles import Phase
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.trace import Int64s

_CAST = re.compile(r"^ToCopyBackward")
_PRODUCT = re.compile(r"^B?[Mm]mBackward")
_PRODUCT_WITH_BIAS = re.compile(r"^AddmmBackward")
# blocks that may be freed between a cast's result and the next allocation
_FREED_WITH_SOURCE = 2


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
    def cast(self) -> Mask:
        """Casts of the gradient that a matrix product computed for its weight."""
        return self._casts[0]

    @cached_property
    def cast_of_others(self) -> Mask:
        """Casts of the gradient that a matrix product computed for its input."""
        return self._casts[1]

    @cached_property
    def applied(self) -> Mask:
        """Blocks that an optimizer's step within backward was the last to use: hooks step as gradients are made."""
        found = np.zeros(len(self._in_backward), dtype=bool)
        freed = self._replayed.freed_by
        blocks = np.flatnonzero(self._in_backward & (freed >= 0))
        blocks = blocks[self._phases.spans_of(freed[blocks]) == self._spans[blocks]]
        steps = np.flatnonzero(self._phases.codes == phase_code(Phase.OPTIMIZER))
        # a step may move no memory
        steps = np.sort(np.append(steps, self._phases.optimizer_starts - 1))
        if not len(steps) or not len(blocks):
            return found
        of_backward = self._replayed.allocated_by[self._in_backward]
        ends = freed[blocks]
        last_step = np.append(-1, steps)[np.searchsorted(steps, ends)]
        last_made = np.append(-1, of_backward)[np.searchsorted(of_backward, ends)]
        made = self._replayed.allocated_by[blocks]
        found[blocks] = (last_step >= made) & (last_step >= last_made)
        return found

    @cached_property
    def kept_so_far(self) -> Mask:
        """Blocks of the last pass that are never freed, in contrast to the gradients of activations.

        These have sizes of a forward pass, and live briefly: a block is kept if none of them is as large, or if it has
        lived longer than all blocks of its size that the pass dropped.
        """
        freed, spans = self._replayed.freed_by, self._spans
        kept: Mask = self._in_backward & (freed < 0)
        numbers, number_of = self._call_sites.sizes
        in_forward = np.zeros(len(numbers), dtype=bool)
        in_forward[number_of[self._in_forward]] = True
        of_pass = np.flatnonzero(self._in_backward & (spans == self._phases.last_span))
        dropped = of_pass[freed[of_pass] >= 0]
        lives = np.searchsorted(self._replayed.allocated_by, freed[dropped]) - dropped
        longest = np.full(len(numbers), len(freed), dtype=np.int64)
        longest[number_of[dropped]] = 0
        np.maximum.at(longest, number_of[dropped], lives)
        young = len(freed) - of_pass <= longest[number_of[of_pass]]
        kept[of_pass[young & in_forward[number_of[of_pass]]]] = False
        return kept

    @cached_property
    def _casts(self) -> tuple[Mask, Mask]:
        """Casts by what they cast: the block of half or twice their size that is freed as soon as they are made."""
        of_weights, of_others = (np.zeros(len(self._in_backward), dtype=bool) for _ in range(2))
        casts = np.flatnonzero(self._in_backward & self._at(_CAST))
        if not len(casts):
            return of_weights, of_others
        freed, sizes = self._replayed.freed_by, self._replayed.requested_bytes
        allocated = np.append(self._replayed.allocated_by, len(self._replayed.trace))
        order = np.argsort(freed, kind="stable")
        order = order[freed[order] >= 0]
        first = np.searchsorted(freed[order], allocated[casts])
        index, count = self._call_sites.index_in_call, self._call_sites.blocks_in_call
        weights = self._at(_PRODUCT) & (index == 0) | self._at(_PRODUCT_WITH_BIAS) & (index == count - 1)
        weights &= count > 1
        inputs = self._at(_PRODUCT) & (index == count - 1) | self._at(_PRODUCT_WITH_BIAS) & (index == 0)
        inputs &= count > 1
        for place in range(_FREED_WITH_SOURCE):
            known = first + place < len(order)
            chosen, source = casts[known], order[first[known] + place]
            is_source = (freed[source] < allocated[chosen + 1]) & (source < chosen)
            is_source &= (2 * sizes[source] == sizes[chosen]) | (sizes[source] == 2 * sizes[chosen])
            of_weights[chosen] |= is_source & weights[source]
            of_others[chosen] |= is_source & inputs[source]
        return of_weights & ~of_others, of_others

    def _at(self, node: re.Pattern[str]) -> Mask:
        return self._call_sites.at(lambda site: node.search(site.node) is not None)
