"""Find what the constructors of DeepSpeed's ZeRO optimizers allocate, which their stacks alone do not tell apart."""

import re
from functools import cached_property

import numpy as np

from ligerprof.analyzers.attribution import frames
from ligerprof.analyzers.attribution.call_sites import CallSites, Mask
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.trace import Int64s

_ZERO3_BUFFERS = re.compile(r"\A\S*zero/stage3\.py:_setup_for_real_optimizer$", re.MULTILINE)
_ZERO3_COPIES = re.compile(rf"zero/stage3\.py{frames.ZERO_MASTER_COPIES}", re.MULTILINE)
_CONSTRUCTOR = re.compile(r"\A\S*zero/stage_1_and_2\.py:__init__$", re.MULTILINE)
_FLATTEN = re.compile(rf"zero/stage_1_and_2\.py{frames.ZERO_FLATTEN}", re.MULTILINE)
# placeholders that take the place of weights while they are on the host
_PLACEHOLDER_BYTES = 16


class Partitions:
    """The buffers of DeepSpeed's ZeRO optimizers.

    Attributes:
        flat_weights: ZeRO-1's and ZeRO-2's weights, flattened on the host and then moved to the GPU.
        master_copies: their copies of a rank's weights for the optimizer, with the 16-bit clones that precede them.
    """

    def __init__(self, replayed: Replay, call_sites: CallSites) -> None:
        self._replayed = replayed
        self._call_sites = call_sites
        self.flat_weights, self.master_copies = self._constructed()

    @cached_property
    def gradients(self) -> Mask:
        """ZeRO-3's buffer for a rank's gradients: as many elements as the fp32 copies, in 16 or 32 bit.

        The bucket that the same function allocates has a size of its own.
        """
        found = self._call_sites.matching_inner(_ZERO3_BUFFERS)
        blocks = np.flatnonzero(found)
        copied = self._live_bytes(self._call_sites.matching_inner(_ZERO3_COPIES), self._replayed.allocated_by[blocks])
        sizes = self._replayed.requested_bytes[blocks]
        found[blocks] = (sizes == copied) | (sizes == copied // 2)
        return found

    def _live_bytes(self, chosen: Mask, moments: Int64s) -> Int64s:
        """Requested bytes of the chosen blocks that are live at each moment."""
        sizes, freed = self._replayed.requested_bytes[chosen], self._replayed.freed_by[chosen]
        order = np.argsort(freed, kind="stable")
        order = order[freed[order] >= 0]
        allocated = np.append(0, np.cumsum(sizes))[np.searchsorted(self._replayed.allocated_by[chosen], moments)]
        released = np.append(0, np.cumsum(sizes[order]))[np.searchsorted(freed[order], moments)]
        live: Int64s = allocated - released
        return live

    def _constructed(self) -> tuple[Mask, Mask]:
        """Flat weights and master copies: the constructor makes one of each per group of weights, in this order.

        Weights that were flattened on the GPU come from a function of their own. Last, offloading makes a buffer that
        moves the largest gradient to the host.
        """
        made, flattened = (self._call_sites.matching_inner(pattern) for pattern in (_CONSTRUCTOR, _FLATTEN))
        made &= self._replayed.requested_bytes > _PLACEHOLDER_BYTES
        flat, copies = np.zeros_like(made), np.zeros_like(made)
        blocks = np.flatnonzero(made | flattened)
        calls = np.cumsum(self._call_sites.index_in_call == 0)[blocks]
        has_weights = False
        for start, end in _runs(calls):
            of_call = blocks[start:end]
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


def _runs(keys: Int64s) -> list[tuple[int, int]]:
    """Start and end of each run of equal keys."""
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    return list(zip(starts.tolist(), np.append(starts, len(keys))[1:].tolist(), strict=True))
