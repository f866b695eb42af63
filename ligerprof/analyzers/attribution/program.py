"""Determine what holds for the whole recording: layers, the loss over a vocabulary, caches of a generation."""

from ligerprof.analyzers.attribution.call_sites import CallSites, Mask
from ligerprof.analyzers.attribution.checkpointing import Regions
from ligerprof.analyzers.attribution.earlier_models import EarlierModels
from ligerprof.analyzers.attribution.generation import find_cached
from ligerprof.analyzers.attribution.layers import layers_in_passes
from ligerprof.analyzers.attribution.older_weights import find_older_weights
from ligerprof.analyzers.attribution.phases import GENERATE, EventPhases, phase_code
from ligerprof.analyzers.attribution.vocabulary import Vocabulary
from ligerprof.roles import Phase
from ligerprof.snapshots.replay import Replay


class Program:
    """Features of a recording's blocks that do not depend on the moment.

    Attributes:
        layers: decoder layer of each block if forward or backward shows it, else -1.
        regions: the checkpointed regions.
        vocabulary: the loss over a vocabulary.
        earlier_models: blocks of models that the process built before the one that it trains.
        older_models: whether each block belongs to one of them and is older than the recording.
        older_weights: whether each block is a weight from before the recording.
        score_sizes: sizes of what a linear layer at the model's end returns, in 16 and 32 bit.
        cached: whether each block holds keys and values between the passes of a generation.
        feeds_pass: whether each block is alive when a later forward pass runs.
        follows_pass: whether each block was allocated after a forward pass, with no other phase in between.
    """

    def __init__(self, replayed: Replay, call_sites: CallSites, phases: EventPhases) -> None:
        self.layers = layers_in_passes(replayed, call_sites, phases)
        self.regions = Regions(replayed, call_sites, phases, self.layers)
        self.earlier_models = EarlierModels(replayed, call_sites, phases)
        self.older_models: Mask = self.earlier_models.blocks & (replayed.allocated_by < 0)
        self.older_weights: Mask = find_older_weights(replayed, call_sites, phases)
        self.cached: Mask = find_cached(replayed, call_sites, phases)
        generates = bool(self.cached.any() or call_sites.matching(GENERATE).any())
        self.score_sizes = _sizes_of_heads(replayed, call_sites, phases)
        self.vocabulary = Vocabulary(replayed, call_sites, phases, generates=generates)
        self.feeds_pass: Mask = phases.feeds_forward(replayed.allocated_by, replayed.freed_by)
        self.follows_pass: Mask = phases.follows_forward(replayed.allocated_by)


def _sizes_of_heads(replayed: Replay, call_sites: CallSites, phases: EventPhases) -> frozenset[int]:
    in_head = call_sites.at(lambda site: site.stack.in_head) & (
        phases.codes_of(replayed.allocated_by) == phase_code(Phase.FORWARD)
    )
    sizes = set(replayed.requested_bytes[in_head].tolist())
    return frozenset(sizes | {2 * size for size in sizes})
