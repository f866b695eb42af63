"""Find the sizes of the weights: by what the build of the model allocated."""

import re
from collections import Counter
from functools import cached_property

import numpy as np

from ligerprof.analyzers.attribution import frames
from ligerprof.analyzers.attribution.call_sites import CallSites
from ligerprof.analyzers.attribution.phases import phase_code
from ligerprof.roles import Phase
from ligerprof.snapshots.distinct import distinct
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.trace import Int64s

# a wrapper that shards weights moves them first
_CONSTRUCTOR = re.compile(r"nn/modules/\w+\.py:__init__$|fsdp/\S*:_move_states_to_device$", re.MULTILINE)
# what optimizers allocate for each weight
STATE = re.compile(frames.OPTIMIZER_STATE, re.MULTILINE)
_TABLE = re.compile(frames.EMBEDDING_TABLE, re.MULTILINE)
# buffers and partitions that an engine or a wrapper makes of the weights
_ENGINE = re.compile(r"deepspeed/runtime/|nn/parallel/distributed\.py:|distributed/utils\.py:_sync_")


class Weights:
    """The sizes of weights as seen from a moment.

    Args:
        codes: `phase_code` of each block.
        moment: the blocks of the build that are live at this moment are weights.
    """

    def __init__(self, replayed: Replay, call_sites: CallSites, codes: Int64s, moment: int) -> None:
        self._call_sites = call_sites
        self._sizes = replayed.requested_bytes
        self._in_build = codes == phase_code(Phase.BUILD)
        self._live = replayed.live_at(moment)

    @cached_property
    def sizes(self) -> frozenset[int]:
        """Sizes allocated while the model was built, including weights that an engine has since partitioned."""
        return frozenset(self._sizes[self._built].tolist())

    def excludes(self, size: int) -> bool:
        """Whether a gradient of a weight cannot have this size; False if the weights are unknown."""
        return bool(self.sizes) and size not in self._possible

    @cached_property
    def _possible(self) -> frozenset[int]:
        """Sizes of weights, of optimizer states and of all weights at once."""
        states = frozenset(distinct(self._sizes[self._call_sites.matching(STATE)]).tolist())
        total_bytes = sum(size * count for size, count in self.live_sizes.items())
        return self.sizes | states | {total_bytes}

    @cached_property
    def live_sizes(self) -> Counter[int]:
        """How many live blocks of the build have each size."""
        return Counter(self._sizes[self._live[self._in_build[self._live]]].tolist())

    @cached_property
    def head_sizes(self) -> frozenset[int]:
        """Sizes of embeddings, which the head's weight shares; else the largest size of a weight."""
        tables = self._sizes[self._built[self._call_sites.matching(_TABLE)[self._built]]].tolist()
        if tables:
            return frozenset(tables)
        own = self._sizes[self._in_build & ~self._call_sites.matching_inner(_ENGINE)]
        return frozenset(own.max(keepdims=True, initial=0).tolist())

    @cached_property
    def _built(self) -> Int64s:
        """Live blocks of the build, and blocks that constructors of torch's modules allocated, live or not."""
        live: Int64s = self._live[self._in_build[self._live]]
        constructed = np.flatnonzero(self._call_sites.matching(_CONSTRUCTOR) & self._in_build)
        return np.append(live, constructed).astype(np.int64)
