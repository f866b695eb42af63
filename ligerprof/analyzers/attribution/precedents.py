"""Tell what the last backward pass would have kept, where the recording ends within it, from the passes before."""

from functools import cached_property

import numpy as np

from ligerprof.analyzers.attribution.call_sites import CallSites, Mask
from ligerprof.analyzers.attribution.phases import EventPhases, phase_code
from ligerprof.roles import Phase
from ligerprof.snapshots.distinct import is_among
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.trace import Int64s


class Precedents:
    """What became of blocks that earlier passes allocated at the same place, in the same size.

    Args:
        spans: the span in which each block was allocated.
        gradients: gradients that a wrapper reduced, which backward drops but had computed to keep.
    """

    def __init__(
        self, replayed: Replay, call_sites: CallSites, phases: EventPhases, *, spans: Int64s, gradients: Mask
    ) -> None:
        self._replayed = replayed
        self._call_sites = call_sites
        self._phases = phases
        self._spans = spans
        self._gradients = gradients

    @cached_property
    def kept(self) -> Mask:
        """Unfinished blocks whose precedents all outlived their pass."""
        return self._outcomes[0]

    @cached_property
    def dropped(self) -> Mask:
        """Unfinished blocks whose precedents all died in their pass."""
        return self._outcomes[1]

    @cached_property
    def _outcomes(self) -> tuple[Mask, Mask]:
        """Whether each block of the last span that is never freed has precedents that were all kept, or all dropped.

        The precedents are those of the latest pass that has any, of passes with the same place in their step if there
        are some: the first one's gradients are kept, those of further micro-batches are added to them.
        """
        freed, last = self._replayed.freed_by, self._phases.last_span
        kept, dropped = np.zeros(len(freed), dtype=bool), np.zeros(len(freed), dtype=bool)
        unfinished = np.flatnonzero((self._spans == last) & (freed < 0))
        if not len(unfinished):
            return kept, dropped
        surroundings, sizes = self._call_sites.surroundings, self._replayed.requested_bytes
        alike = is_among(surroundings, surroundings[unfinished]) & is_among(sizes, sizes[unfinished])
        earlier = np.flatnonzero(alike & (self._spans < last) & (self._spans >= 0))
        in_place = self._places_in_step[self._spans[earlier]] == self._places_in_step[last]
        earlier = earlier[in_place] if in_place.any() else earlier
        outlived = (freed[earlier] < 0) | (self._phases.spans_of(freed[earlier]) > self._spans[earlier])
        outlived |= self._gradients[earlier]
        columns = np.stack([surroundings, sizes])[:, np.append(earlier, unfinished)]
        groups = np.unique(columns, axis=1, return_inverse=True)[1].reshape(-1)
        of_earlier, of_unfinished = groups[: len(earlier)], groups[len(earlier) :]
        # the first steps of a program may differ from the others
        latest = np.full(int(groups.max()) + 1, -1, dtype=np.int64)
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
        places: Int64s = passes - before
        return places
