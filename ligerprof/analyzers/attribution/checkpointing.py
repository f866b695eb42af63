"""Find what selective checkpointing keeps: the outputs of checkpointed regions, and the input of the first one."""

import re

import numpy as np

from ligerprof.analyzers.attribution import frames
from ligerprof.analyzers.attribution.call_sites import CallSites, Mask
from ligerprof.analyzers.attribution.phases import EventPhases, phase_code
from ligerprof.roles import Phase
from ligerprof.snapshots.distinct import distinct, is_among, number_pairs
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.trace import Int64s

CHECKPOINT_CALL = re.compile(f"{frames.CHECKPOINT}:")
# the function that a program calls, once for each region around a block
NESTED_CHECKPOINTS = re.compile(rf"(?:{frames.CHECKPOINT}:checkpoint$[\s\S]*?){{2}}", re.MULTILINE)
# the products of bitsandbytes' 8-bit weights keep their inputs as attributes, which checkpointing's hooks do not see
_KEEPS_INPUTS = re.compile(
    r"bitsandbytes/autograd/_functions\.py:matmul$|ligerprof/runs/simulated/low_bit\.py:multiply_int8$", re.MULTILINE
)
_SELECTED = re.compile(f"{frames.CHECKPOINT}:__torch_dispatch__$", re.MULTILINE)


class Regions:
    """The checkpointed regions of forward, one per layer and pass.

    A region without a policy keeps its input, which is the last block that the pass kept before it, and nothing else
    that it allocated. Under a selective policy, which runs as a dispatch mode, it also keeps the results of chosen
    operators: these are activations, as they are without checkpointing. So are the inputs of products of 8-bit weights.

    Attributes:
        selected: whether a selective policy or such a product kept each block, other than as a region's last kept one.
        inputs: whether each block is the input of a region.
        outside: whether each block is outside of all regions: of another layer, of a pass without regions, or the
            output of a region that no other one follows. None is if the recording does not show regions.
    """

    def __init__(self, replayed: Replay, call_sites: CallSites, phases: EventPhases, layers: Int64s) -> None:
        codes = phases.codes_of(replayed.allocated_by)
        spans = phases.spans_of(replayed.allocated_by)
        kept = (replayed.freed_by < 0) | (phases.spans_of(replayed.freed_by) > spans)
        kept &= codes == phase_code(Phase.FORWARD)
        in_region = call_sites.matching(CHECKPOINT_CALL)
        by_policy = call_sites.matching(_SELECTED)
        regions = np.flatnonzero(in_region & (codes == phase_code(Phase.FORWARD)))
        if (layers[regions] >= 0).any():
            # an engine gathers weights on the way, as of the next layer
            regions = regions[layers[regions] >= 0]
        blocks = regions[kept[regions]]
        if call_sites.matching(_KEEPS_INPUTS).any():
            # without the layer, the region of a block is unknown, and so is the last block that it keeps
            by_policy |= in_region & (layers >= 0)
        outputs = _of_groups(blocks, spans, layers, last=True)
        self.selected: Mask = kept & by_policy
        self.selected[outputs] = False
        self.inputs: Mask = np.zeros(len(codes), dtype=bool)
        starts = _of_groups(regions, spans, layers)
        # a layer's output is as large as its input
        sizes = number_pairs(spans + 1, call_sites.sizes[1])
        candidates = np.flatnonzero(kept & is_among(sizes, distinct(sizes[outputs])))
        places = np.searchsorted(candidates, starts) - 1
        starts, before = starts[places >= 0], candidates[places[places >= 0]]
        self.inputs[before[spans[before] == spans[starts]]] = True
        self.outside: Mask = np.zeros(len(codes), dtype=bool)
        if len(regions):
            of_layers = number_pairs(spans + 1, layers + 1)
            self.outside = ~is_among(of_layers, distinct(of_layers[regions]))
            # the next layer of an unfinished pass may be another region
            ended = np.append(spans[outputs[1:]] == spans[outputs[:-1]], False)[: len(outputs)]
            ended |= spans[outputs] < phases.last_span
            self.outside[outputs] = ended & ~self.inputs[outputs]


def _of_groups(blocks: Int64s, spans: Int64s, layers: Int64s, *, last: bool = False) -> Int64s:
    """The first or last block of each span and layer."""
    if not len(blocks):
        return blocks
    ordered = blocks[::-1] if last else blocks
    _, first = np.unique(np.stack([spans[ordered], layers[ordered]]), axis=1, return_index=True)
    return np.sort(ordered[first])
