"""Find memory of models that a process built earlier and still holds while it trains another one.

The later model was built after an optimizer had stepped, or after blocks that are older than the recording. Its passes
use no other model if a single line of the program runs models, all of whose parts take part in backward: a teacher, a
reference model or a frozen encoder runs without gradients, and the networks of a GAN run from lines of their own.
"""

import re
from collections import Counter
from collections.abc import Hashable

import numpy as np

from ligerprof.analyzers.attribution.call_sites import CallSites, Mask
from ligerprof.analyzers.attribution.older_weights import gradients_of_passes
from ligerprof.analyzers.attribution.phases import EventPhases, are_codes_of, phase_code
from ligerprof.analyzers.attribution.weights import STATE
from ligerprof.roles import Phase
from ligerprof.snapshots.distinct import distinct, is_among
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.trace import Int64s

_HELD = (Phase.BUILD, Phase.OPTIMIZER, Phase.BACKWARD)
# a part that allocates less often in a pass is a head or an embedding, which backward may not need
_LEAST_LAYERS = 2
# adapters and new heads are smaller parts of the model that they are added to
_LEAST_SHARE = 0.25
_LAYER = re.compile(r"torch/nn/modules/(?!module|container)\w+\.py:")


class EarlierModels:
    """Blocks of models that a later model has replaced.

    Attributes:
        blocks: whether each block is memory of an earlier model: weights, gradients, states of its optimizer.
        since: the event at which the build of the last model began; -1 if no model was built after another.
    """

    def __init__(self, replayed: Replay, call_sites: CallSites, phases: EventPhases) -> None:
        self._replayed, self._call_sites, self._phases = replayed, call_sites, phases
        self._codes = phases.codes_of(replayed.allocated_by)
        self.blocks: Mask = np.zeros(len(self._codes), dtype=bool)
        self.since = self._last_build()
        if self.since < 0:
            return
        forward = np.flatnonzero(phases.codes == phase_code(Phase.FORWARD))
        live = replayed.live_at(int(forward[np.searchsorted(forward, self.since)]))
        of_stack = np.array([phase_code(site.stack.phase) for site in call_sites.sites], dtype=np.int64)
        is_older = live < len(replayed.older_blocks)
        codes = np.where(is_older, of_stack[call_sites.site_of[live]], self._codes[live])
        held = (replayed.allocated_by[live] < self.since) & are_codes_of(codes, *_HELD)
        built = live[(replayed.allocated_by[live] >= self.since) & (codes == phase_code(Phase.BUILD))]
        sizes, weights = replayed.requested_bytes, live[held & (codes == phase_code(Phase.BUILD))]
        # a library's workspace stays too
        held &= (codes != phase_code(Phase.BACKWARD)) | is_among(sizes[live], sizes[weights])
        is_whole = len(built) > 0 and sizes[built].sum() >= _LEAST_SHARE * sizes[weights].sum()
        is_new = is_older[held].all() or self._starts_optimizer(built)
        if is_whole and is_new and self._trains_no_more(weights, built) and self._runs_one_model():
            self.blocks[live[held]] = True

    def _last_build(self) -> int:
        starts = self._phases.span_starts
        codes = self._phases.codes[starts]
        builds, steps, forward = (
            np.flatnonzero(codes == phase_code(phase)) for phase in (Phase.BUILD, Phase.OPTIMIZER, Phase.FORWARD)
        )
        builds = builds[builds < forward.max(initial=-1)]
        if not len(builds):
            return -1
        # a model may be built in several spans
        last_step = int(steps[steps < builds[-1]].max(initial=-1))
        first = int(builds[builds > last_step][0])
        older = len(self._replayed.older_blocks)
        follows_older = 0 < older < len(self._codes) and self._codes[older] == phase_code(Phase.BUILD)
        return int(starts[first]) if last_step >= 0 or follows_older else -1

    def _starts_optimizer(self, built: Int64s) -> bool:
        """Whether an optimizer makes states as large as the built weights, as it does in its first step alone."""
        states = self._call_sites.matching(STATE) & (self._replayed.allocated_by >= self.since)
        sizes = self._replayed.requested_bytes
        return bool(2 * sizes[states].sum() >= sizes[built].sum())

    def _trains_no_more(self, weights: Int64s, built: Int64s) -> bool:
        """Whether backward leaves no more gradients of each size than the built model has weights."""
        sizes = self._replayed.requested_bytes
        gradients, counts = gradients_of_passes(self._replayed, self._phases), Counter(sizes[built].tolist())
        return all(gradients[size] <= counts[size] for size in sizes[weights].tolist())

    def _runs_one_model(self) -> bool:
        """Whether one line runs a model after the last build, and backward uses each of its parts."""
        freed = self._replayed.freed_by
        used = (freed < 0) | (self._phases.codes_of(freed) == phase_code(Phase.BACKWARD))
        chosen = (self._codes == phase_code(Phase.FORWARD)) & (self._replayed.allocated_by >= self.since)
        site_of = self._call_sites.site_of
        in_backward, counts = set(site_of[chosen & used].tolist()), np.bincount(site_of[chosen])
        passes = len(distinct(self._phases.spans_of(self._replayed.allocated_by[chosen])))
        layers: Counter[Hashable] = Counter()
        trained: set[Hashable] = set()
        lines: set[Hashable] = set()
        for site in set(site_of[chosen].tolist()):
            stack = self._call_sites.sites[site].stack
            parts = {stack.model_calls[:depth] for depth in (1, 2)}
            if site in in_backward:
                trained.update(parts)
            if _LAYER.search(stack.text) and stack.model_calls:
                lines.add(stack.script_calls)
                layers.update(dict.fromkeys(parts, int(counts[site])))
        return len(lines) == 1 and all(part in trained for part in layers if layers[part] >= _LEAST_LAYERS * passes)
