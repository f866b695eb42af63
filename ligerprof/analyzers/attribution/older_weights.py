"""Find weights that are older than the recording: by the gradients that each backward pass leaves.

Every gradient belongs to a weight of its size, which is older than the recording and lives through it. If the old
blocks of each such size are exactly as many as the gradients, they are the weights. With Adam's moments among them,
they are three times as many, and nothing shows which of them are weights.
"""

from collections import Counter

import numpy as np

from ligerprof.analyzers.attribution.call_sites import CallSites, Mask
from ligerprof.analyzers.attribution.phases import EventPhases, phase_code
from ligerprof.roles import Phase
from ligerprof.snapshots.distinct import is_among
from ligerprof.snapshots.replay import Replay

# step counters of an optimizer are as large as a weight of one element
_LARGEST_COUNTER_BYTES = 8


def find_older_weights(replayed: Replay, call_sites: CallSites, phases: EventPhases) -> Mask:
    """Whether each block is a weight from before the recording; none is if their number leaves any doubt."""
    weights: Mask = np.zeros(len(replayed.freed_by), dtype=bool)
    older = np.arange(len(replayed.older_blocks))
    unknown = call_sites.at(lambda site: not site.is_known)[older]
    older = older[unknown & (replayed.freed_by[older] < 0)]
    gradients = gradients_of_passes(replayed, phases) if len(older) else Counter[int]()
    sizes = replayed.requested_bytes[older]
    held = Counter(sizes.tolist())
    if gradients and all(held[size] == count for size, count in gradients.items()):
        weights[older[is_among(sizes, gradients)]] = True
    return weights


def gradients_of_passes(replayed: Replay, phases: EventPhases) -> Counter[int]:
    """How many blocks of each size the last two backward passes both leave behind; empty with fewer."""
    codes = phases.codes_of(replayed.allocated_by)
    blocks = np.flatnonzero((codes == phase_code(Phase.BACKWARD)) & (replayed.requested_bytes > _LARGEST_COUNTER_BYTES))
    freed = replayed.freed_by[blocks]
    spans = phases.spans_of(replayed.allocated_by[blocks])
    left = (freed < 0) | (phases.spans_of(freed) > spans)
    # a pass that the recording does not see to its end
    left &= spans < phases.last_span
    blocks, spans = blocks[left], spans[left]
    order = np.argsort(spans, kind="stable")
    passes = np.split(replayed.requested_bytes[blocks][order], np.flatnonzero(np.diff(spans[order])) + 1)
    found = [Counter(each.tolist()) for each in passes if len(each)]
    # a library's workspace stays after the first pass alone
    return found[-1] & found[-2] if len(found) > 1 else Counter()
