"""Determine what holds for the whole recording: layers, the loss over a vocabulary, caches of a generation."""

import re
from collections.abc import Iterator

import numpy as np

from ligerprof.analyzers.attribution.layers import Regions, layers_in_passes
from ligerprof.analyzers.attribution.phases import GENERATE, EventPhases, phase_code
from ligerprof.analyzers.attribution.stacks import WRAPPERS, CallSite, CallSites, Mask
from ligerprof.analyzers.attribution.vocabulary import Vocabulary, is_look_up
from ligerprof.analyzers.attribution.weights import EarlierModels, find_older_weights
from ligerprof.roles import Phase
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.trace import Int64s, distinct, is_among

_CACHE_LIBRARY = re.compile(r"^transformers/cache_utils\.py:", re.MULTILINE)
_STATIC_CACHE = re.compile(r"^transformers/cache_utils\.py:lazy_initialization$", re.MULTILINE)
# a program's own names for a buffer that it fills in place, such as `setup_caches` or `kv_cache.py`
_CACHE_NAME = re.compile(r"(?:\b|_)(?:kv_?)?caches?(?:\b|_)", re.IGNORECASE)
_OTHER_CACHE = re.compile(r"rope|rotary|freq|sincos|mask|position")
_FEWEST_PASSES = 3
# keys and values of two layers
_FEWEST_NAMED = 4
# a prompt is longer than the tokens that later passes decode
_LEAST_TOKENS_BEFORE = 8
_CONVERSIONS = frozenset({"convert", "<lambda>"})
# keys may be freed only once the values have been replaced too
_LATEST_REPLACEMENT = 2


def find_cached(replayed: Replay, call_sites: CallSites, phases: EventPhases) -> Mask:
    """Whether each block holds keys and values between the forward passes of a generation.

    Passes whose tensors a backward pass frees belong to training, where keys and values are saved for backward. Of
    the others, a block is cached

    - if transformers' cache allocated it during `generate()`, or as a buffer that it fills in place and keeps;
    - if it grows from pass to pass: every layer replaces its block by a larger one of the same call. What the first
      of these passes replaced, layer by layer, is cached too, such as the projection that the keys are views of;
    - if a program without backward creates four or more equal tensors in a function named after a cache and keeps
      them;
    - if such a program decodes tokens, and no other rule finds where keys and values are: the largest buffers that its
      build allocates in pairs.
    """
    codes = phases.codes_of(replayed.allocated_by)
    spans = phases.spans_of(replayed.allocated_by)
    inferred = (codes == phase_code(Phase.FORWARD)) & ~_trains(replayed, call_sites, phases, codes, spans)
    kept = (replayed.freed_by < 0) | (phases.spans_of(replayed.freed_by) != spans)
    cached = np.zeros(len(codes), dtype=bool)
    in_library = call_sites.matching(_CACHE_LIBRARY)
    if in_library.any():
        generates = call_sites.matching(GENERATE)
        in_place = call_sites.matching(_STATIC_CACHE)
        cached |= in_library & inferred & (generates | (in_place & kept))
        # beam search reorders it between passes
        cached |= in_library & generates & (codes == phase_code(Phase.OUTSIDE))
    for group in _growing(replayed, call_sites, inferred & ~cached):
        cached[group] = True
    if not (phases.codes == phase_code(Phase.BACKWARD)).any():
        cached |= _named(replayed, call_sites, kept & (spans < phases.last_span))
        if not cached.any() and _decodes(replayed, call_sites, codes, spans):
            cached |= _paired(replayed, call_sites, kept & (codes == phase_code(Phase.BUILD)))
    return cached


def _decodes(replayed: Replay, call_sites: CallSites, codes: Int64s, spans: Int64s) -> bool:
    """Whether a pass looks far fewer tokens up than one before, as only a model can that keeps keys and values."""
    looked_up = np.flatnonzero(call_sites.at(is_look_up) & (codes == phase_code(Phase.FORWARD)))
    sizes = replayed.requested_bytes[looked_up]
    highest = np.append(0, np.maximum.accumulate(sizes))[np.searchsorted(spans[looked_up], spans[looked_up])]
    return bool((sizes * _LEAST_TOKENS_BEFORE <= highest).any())


def _paired(replayed: Replay, call_sites: CallSites, built: Mask) -> Mask:
    """The largest tensors that the build of a model allocates two at a time, apart from weights.

    They are buffers of its modules, or tensors that its own constructors make. `Module._apply` moves weights first
    and buffers last, from two lines.
    """
    sites = call_sites.sites
    lines = [_line_of_apply(site) for site in sites]
    last = max(lines, default=0) if len({line for line in lines if line}) > 1 else 0
    kinds = [
        line == last if line else not _first_call(site).startswith("torch/")
        for site, line in zip(sites, lines, strict=True)
    ]
    is_weight = built & ~np.array([*kinds, False], dtype=bool)[call_sites.site_of]
    sizes = replayed.requested_bytes
    blocks = np.flatnonzero(built & ~is_weight & ~is_among(sizes, distinct(sizes[is_weight])))
    paired = np.zeros(len(built), dtype=bool)
    if not len(blocks):
        return paired
    largest = blocks[sizes[blocks] == sizes[blocks].max()]
    follows = np.diff(largest, prepend=-2) == 1
    if len(largest) >= _FEWEST_NAMED and (follows == (np.arange(len(largest)) % 2 == 1)).all():
        paired[largest] = True
    return paired


def _line_of_apply(site: CallSite) -> int:
    """The line of `Module._apply` that converts a tensor, 0 elsewhere."""
    calls = site.stack.calls[:2]
    converts = len(calls) > 1 and calls[0].function in _CONVERSIONS and calls[1].function == "_apply"
    return calls[1].line if converts else 0


def _first_call(site: CallSite) -> str:
    """The file of the innermost Python call that does more than forward to an operator."""
    return next((call.file for call in site.stack.calls if not WRAPPERS.search(call.file)), "torch/")


def _trains(replayed: Replay, call_sites: CallSites, phases: EventPhases, codes: Int64s, spans: Int64s) -> Mask:
    """Whether each block was allocated in a span that backward frees a block of, or at such a span's sites."""
    freed_in = np.where(replayed.freed_by < 0, phase_code(None), phases.codes_of(replayed.freed_by))
    saved = (codes == phase_code(Phase.FORWARD)) & (freed_in == phase_code(Phase.BACKWARD))
    is_saved_in = np.zeros(phases.last_span + 2, dtype=bool)
    is_saved_in[spans[saved]] = True
    in_span = is_saved_in[spans]
    in_site = np.zeros(len(call_sites.sites), dtype=bool)
    in_site[call_sites.site_of[in_span & (codes == phase_code(Phase.FORWARD))]] = True
    trains: Mask = in_span | in_site[call_sites.site_of]
    return trains


def _growing(replayed: Replay, call_sites: CallSites, candidates: Mask) -> Iterator[Int64s]:
    """Blocks that a call replaces by larger ones in each pass, and the blocks that the first pass replaced."""
    blocks = np.flatnonzero(candidates)
    for chain in _chains(replayed, call_sites, blocks):
        yield chain
        yield _replaced_by(replayed, call_sites, chain, blocks)


def _chains(replayed: Replay, call_sites: CallSites, blocks: Int64s) -> Iterator[Int64s]:
    """Blocks of one call site that grow from pass to pass and live until the next pass has replaced them."""
    sites = call_sites.site_of[blocks]
    order = np.argsort(sites, kind="stable")
    for of_site in np.split(blocks[order], np.flatnonzero(np.diff(sites[order])) + 1):
        if len(of_site) < _FEWEST_PASSES:
            continue
        growth = np.diff(replayed.requested_bytes[of_site])
        # a smaller block starts another generation
        for chain in np.split(of_site, np.flatnonzero(growth < 0) + 1):
            if _grows(replayed, call_sites, chain):
                yield chain


def _grows(replayed: Replay, call_sites: CallSites, chain: Int64s) -> bool:
    ends = np.append(np.flatnonzero(np.diff(replayed.requested_bytes[chain])) + 1, len(chain))
    layers = int(ends[0])
    counts = np.diff(ends, prepend=0)
    if len(counts) < _FEWEST_PASSES or layers < 2 or (counts[:-1] != layers).any() or counts[-1] > layers:
        return False
    replaced, replacing = chain[:-layers], chain[layers:]
    freed = replayed.freed_by[replaced]
    if (freed < replayed.allocated_by[replacing]).any():
        return False
    # a concatenation replaces its input by definition; of others, the replaced block is freed soon
    if "cat" in call_sites.of(int(chain[0])).stack.operators:
        return True
    latest = np.arange(len(replaced)) + layers + min(_LATEST_REPLACEMENT, layers - 1)
    known = latest < len(chain)
    return bool((freed[known] < replayed.allocated_by[chain[latest[known]]]).all())


def _replaced_by(replayed: Replay, call_sites: CallSites, chain: Int64s, blocks: Int64s) -> Int64s:
    """Blocks of an earlier pass that are freed while the first pass of a chain runs, layer by layer."""
    layers = int((replayed.requested_bytes[chain] == replayed.requested_bytes[chain[0]]).sum())
    start, stop = replayed.allocated_by[chain[0]], replayed.allocated_by[chain[layers]]
    freed = replayed.freed_by[blocks]
    earlier = blocks[(replayed.allocated_by[blocks] < start) & (freed > start) & (freed < stop)]
    keys = np.stack([call_sites.site_of[earlier], replayed.requested_bytes[earlier]])
    _, group, counts = np.unique(keys, axis=1, return_inverse=True, return_counts=True)
    replaced: Int64s = earlier[counts[group.reshape(-1)] >= 2]
    return replaced


def _named(replayed: Replay, call_sites: CallSites, kept: Mask) -> Mask:
    """Kept blocks of functions named after a cache, if one allocates keys and values of several layers."""
    functions = [_cache_function(site) for site in call_sites.sites]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(functions))}
    of_block = np.array([numbers[name] for name in functions], dtype=np.int64)[call_sites.site_of]
    blocks = np.flatnonzero(kept & (of_block != numbers.get("", -1)))
    keys = np.stack([of_block[blocks], replayed.requested_bytes[blocks]])
    _, group, counts = np.unique(keys, axis=1, return_inverse=True, return_counts=True)
    named = np.zeros(len(kept), dtype=bool)
    named[blocks[counts[group.reshape(-1)] >= _FEWEST_NAMED]] = True
    return named


def _cache_function(site: CallSite) -> str:
    """The function that creates a tensor, or an object that holds it, if it is named after a cache; else "".

    Tensors that a function only moves, or that a module of torch creates, do not count.
    """
    first = _first_call(site)
    if first.startswith(("torch/", "transformers/")):
        return ""
    own = (call for call in site.stack.calls if not WRAPPERS.search(call.file))
    calls = [call for call in own if call.function != "__init__"][:1]
    files = (first, *(call.file for call in calls))
    names = [*(call.function for call in calls), *(file.rpartition("/")[2].removesuffix(".py") for file in files)]
    named = any(_CACHE_NAME.search(name) and not _OTHER_CACHE.search(name) for name in names)
    return ":".join(names) if named else ""


class ProgramFrames:
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
