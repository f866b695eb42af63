"""Find copies of the weights that a script makes outside of its passes: moving averages, fp32 copies to be trained."""

from collections import Counter
from functools import cached_property

import numpy as np

from ligerprof.analyzers.attribution.call_sites import CallSites, Mask
from ligerprof.analyzers.attribution.phases import EventPhases, phase_code
from ligerprof.analyzers.attribution.weights import STATE
from ligerprof.roles import Phase
from ligerprof.snapshots.distinct import is_among, number_pairs
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.trace import Int64s

# a few tensors can have the sizes of weights by chance
_LEAST_BLOCKS = 4
_LEAST_SHARE = 0.9


class WeightCopies:
    """Blocks that a call site allocates outside of all passes, one for each weight.

    Args:
        codes: `phase_code` of each block.
        lasting: whether each block is alive when a later forward pass runs.
        weights: the sizes of the live weights, and how many have each.
    """

    def __init__(
        self,
        replayed: Replay,
        call_sites: CallSites,
        phases: EventPhases,
        codes: Int64s,
        *,
        lasting: Mask,
        weights: Counter[int],
    ) -> None:
        self._replayed = replayed
        self._call_sites = call_sites
        self._outside = codes == phase_code(Phase.OUTSIDE)
        # a copy can take a second operator, whose result is dropped
        groups = number_pairs(phases.spans_of(replayed.allocated_by) + 1, lasting.astype(np.int64))
        self._groups = number_pairs(groups, call_sites.place_of)
        self._weights = weights

    @cached_property
    def equal(self) -> Mask:
        """Whether each block is one of as many as there are weights, of their sizes."""
        return self._found(1)

    @cached_property
    def doubled(self) -> Mask:
        """The same with twice the bytes: fp32 next to 16-bit weights."""
        return self._found(2)

    @cached_property
    def trains_doubled(self) -> bool:
        """Whether the optimizer's states have twice the bytes of the weights, so that it steps copies in fp32."""
        states = set(self._replayed.requested_bytes[self._call_sites.matching(STATE)].tolist())
        largest = max(self._weights, default=0)
        return 2 * largest in states and largest not in states

    @cached_property
    def flat(self) -> Mask:
        """Whether each block is as large as all weights together, in 16 or 32 bit."""
        total_bytes = sum(size * count for size, count in self._weights.items())
        sizes = (total_bytes, 2 * total_bytes) if self._weights.total() >= _LEAST_BLOCKS else ()
        found: Mask = self._outside & is_among(self._replayed.requested_bytes, sizes)
        return found

    def _found(self, factor: int) -> Mask:
        found: Mask = np.zeros(len(self._outside), dtype=bool)
        sizes = Counter({factor * size: count for size, count in self._weights.items()})
        needed_bytes = _LEAST_SHARE * sum(size * count for size, count in sizes.items())
        blocks = np.flatnonzero(self._outside & is_among(self._replayed.requested_bytes, sizes))
        blocks = blocks[np.argsort(self._groups[blocks], kind="stable")]
        for group in np.split(blocks, np.flatnonzero(np.diff(self._groups[blocks])) + 1):
            held = Counter(self._replayed.requested_bytes[group].tolist())
            if len(group) >= _LEAST_BLOCKS and held <= sizes and sum(held.elements()) >= needed_bytes:
                found[group] = True
        return found
