"""Find what selective checkpointing keeps: the outputs of checkpointed regions, and the input of the first one."""

import re

import numpy as np

from ligerprof.analyzers.attribution.call_sites import CallSites, Mask
from ligerprof.analyzers.attribution.phases import EventPhases, phase_code
from ligerprof.roles import Phase
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.trace import Int64s

CHECKPOINT_CALL = re.compile(r"torch/utils/checkpoint\.py:")
# the function that a program calls, once for each region around a block
NESTED_CHECKPOINTS = re.compile(r"(?:torch/utils/checkpoint\.py:checkpoint$[\s\S]*?){2}", re.MULTILINE)
# the products of bitsandbytes' 8-bit weights keep their inputs as attributes, which checkpointing's hooks do not see
_KEEPS_INPUTS = re.compile(
    r"bitsandbytes/autograd/_functions\.py:matmul$|ligerprof/runs/simulated/low_bit\.py:multiply_int8$", re.MULTILINE
)
_SELECTED = re.compile(r"torch/utils/checkpoint\.py:__torch_dispatch__$", re.MULTILINE)


class Regions:
    """The checkpointed regions of forward, one per layer and pass.

    A region without a policy keeps nothing that it allocated except its output, the next region's input. Under a
    selective policy, which runs as a dispatch mode, it also keeps the results of chosen operators: these are
    activations, as they are without checkpointing. So are the inputs of products of 8-bit weights.

    Attributes:
        selected: whether a selective policy or such a product kept each block, other than as a region's last kept one.
        inputs: whether each block is the input of the first region of its pass.
    """

    def __init__(self, replayed: Replay, call_sites: CallSites, phases: EventPhases, layers: Int64s) -> None:
        codes = phases.codes_of(replayed.allocated_by)
        spans = phases.spans_of(replayed.allocated_by)
        kept = (replayed.freed_by < 0) | (phases.spans_of(replayed.freed_by) > spans)
        kept &= codes == phase_code(Phase.FORWARD)
        in_region = call_sites.matching(CHECKPOINT_CALL)
        by_policy = call_sites.matching(_SELECTED)
        blocks = np.flatnonzero(kept & in_region)
        if call_sites.matching(_KEEPS_INPUTS).any():
            # without the layer, the region of a block is unknown, and so is the last block that it keeps
            by_policy |= in_region & (layers >= 0)
        outputs = _last_of_groups(blocks, np.stack([spans[blocks], layers[blocks]]))
        self.selected: Mask = kept & by_policy
        self.selected[outputs] = False
        self.inputs: Mask = np.zeros(len(codes), dtype=bool)
        regions, kept_blocks = np.flatnonzero(in_region), np.flatnonzero(kept)
        passes, first = np.unique(spans[regions], return_index=True)
        before = kept_blocks[np.searchsorted(kept_blocks, regions[first]) - 1] if len(kept_blocks) else first
        for span, start, block in zip(passes.tolist(), regions[first].tolist(), before.tolist(), strict=True):
            # a layer's output is as large as its input
            of_pass = outputs[slice(*np.searchsorted(spans[outputs], (span, span + 1)))]
            sizes = replayed.requested_bytes[of_pass]
            in_pass = block < start and spans[block] == span
            self.inputs[block] |= in_pass and replayed.requested_bytes[block] in sizes


def _last_of_groups(blocks: Int64s, keys: Int64s) -> Int64s:
    """The last block of each group of blocks with equal keys, given as columns."""
    if not len(blocks):
        return blocks
    _, last = np.unique(keys[:, ::-1], axis=1, return_index=True)
    return np.sort(blocks[len(blocks) - 1 - last])
