"""Decide which decoder layer a block belongs to: by its module's name, else by the order in which layers run."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ligerprof.analyzers.attribution.call_sites import CallSite, CallSites
from ligerprof.analyzers.attribution.phases import EventPhases
from ligerprof.analyzers.attribution.stacks import PythonCall
from ligerprof.roles import Phase, Role
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.trace import Int64s

Chain = tuple[PythonCall, ...]

NO_LAYER = -1

# how deep in the model's calls its loop over the layers may be
_DEEPEST_LOOP = 5


def layers_in_passes(replayed: Replay, call_sites: CallSites, phases: EventPhases) -> Int64s:
    """The layer of each block that forward or backward allocated, -1 if unknown.

    Without stamps, stacks show the loop over the layers: one call repeats, and under it the lines
    of the layer's own code start over each time. Recomputation runs from the last layer to the first.
    """
    of_site = np.array([NO_LAYER if site.layer is None else site.layer for site in call_sites.sites], dtype=np.int64)
    if (of_site != NO_LAYER).any():
        stamped: Int64s = of_site[call_sites.site_of]
        return stamped
    return _layers_by_loops(replayed, call_sites, phases)


def layers_by_weights(
    replayed: Replay, call_sites: CallSites, roles: Mapping[int, Role], known: Int64s
) -> dict[int, int]:
    """Layers of weights, by the order of their construction, and of their optimizer states and gradients.

    Optimizer states follow the weights in their order; gradients come layer by layer, in sizes
    that add up to a layer's weights.

    Args:
        roles: roles of the live blocks.
        known: layers from `layers_in_passes`.
    """
    by_role: dict[Role, list[int]] = defaultdict(list)
    for block, role in roles.items():
        by_role[role].append(block)
    blocks = np.array(list(roles), dtype=np.int64)
    sizes: dict[int, int] = dict(zip(roles, replayed.requested_bytes[blocks].tolist(), strict=True))
    weights = by_role[Role.PARAMETERS]
    layers = _loop(weights, [call_sites.of(block).stack.build_calls for block in weights])
    gradients = [block for block in by_role[Role.GRADIENTS] if known[block] == NO_LAYER]
    return {
        **_layers_of_states(by_role[Role.OPTIMIZER_STATES], weights, layers, call_sites, sizes),
        **_layers_of_gradients(gradients, weights, layers, sizes),
        **layers,
    }


def _loop(blocks: Sequence[int], chains: Sequence[Chain]) -> dict[int, int]:
    """The iteration of the loop over the layers that allocated each block.

    Args:
        blocks: in the order of allocation.
        chains: the model's calls behind each block, outermost first.
    """
    best: list[tuple[int, int]] = []
    rounds = 0
    # many blocks share a chain
    distinct = {id(chain): chain for chain in chains}
    for depth in range(_DEEPEST_LOOP):
        heads = {number: (chain[:depth], chain[depth].line) for number, chain in distinct.items() if len(chain) > depth}
        under: dict[Chain, list[tuple[int, int]]] = defaultdict(list)
        of_head = {number: (under[head], line) for number, (head, line) in heads.items()}
        for block, chain in zip(blocks, chains, strict=True):
            if id(chain) in of_head:
                made, line = of_head[id(chain)]
                made.append((block, line))
        for made in under.values():
            counted = list(_count_rounds(made))
            # a loop inside a layer runs as often as the loop over the layers, so the outermost wins
            if counted[-1][1] > rounds:
                best, rounds = counted, counted[-1][1]
    return dict(best)


def _count_rounds(made: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Each block with the number of times that the first line has run again after a later line."""
    first = made[0][1]
    current, rounds = first, 0
    for block, line in made:
        if line == first and current > first:
            rounds += 1
        current = line
        yield block, rounds


def _layers_by_loops(replayed: Replay, call_sites: CallSites, phases: EventPhases) -> Int64s:
    """Layers of the blocks that forward and backward allocated, span by span."""
    layers = np.full(len(replayed.block_bytes), NO_LAYER, dtype=np.int64)
    last_layer = 0
    # all steps of a training loop allocate in the same order
    known: dict[tuple[Phase | None, int, bytes], tuple[Int64s, Int64s]] = {}
    for blocks in _blocks_by_span(replayed, phases):
        phase, sites = phases.phase_at(int(replayed.allocated_by[blocks[0]])), call_sites.site_of[blocks]
        key = (phase, last_layer if phase is Phase.BACKWARD else 0, sites.tobytes())
        if key not in known:
            found = _layers_in_span([call_sites.sites[site] for site in sites.tolist()], phase, last_layer)
            known[key] = np.array(list(found), dtype=np.int64), np.array(list(found.values()), dtype=np.int64)
        places, numbers = known[key]
        if phase is Phase.FORWARD and len(numbers):
            last_layer = int(numbers.max())
        layers[blocks[places]] = numbers
    return layers


def _blocks_by_span(replayed: Replay, phases: EventPhases) -> Iterator[Int64s]:
    within = np.flatnonzero(replayed.allocated_by >= 0)
    if len(within):
        spans = phases.spans[replayed.allocated_by[within]]
        yield from np.split(within, np.flatnonzero(np.diff(spans)) + 1)


def _layers_in_span(sites: Sequence[CallSite], phase: Phase | None, last_layer: int) -> dict[int, int]:
    """Layers of one span's blocks, by index in the span.

    In backward, recomputed layers count down; later allocations belong to the last one, up to the embedding.
    """
    if phase is Phase.FORWARD:
        return _loop(range(len(sites)), [site.stack.model_calls for site in sites])
    recomputed = [place for place, site in enumerate(sites) if site.recomputes]
    if phase is not Phase.BACKWARD or not recomputed:
        return {}
    rounds = _loop(recomputed, [sites[place].stack.model_calls for place in recomputed])
    layers: dict[int, int] = {}
    current: int | None = None
    for place, site in enumerate(sites):
        if place in rounds:
            current = last_layer - rounds[place]
        if current is not None and current >= 0 and not site.node.startswith("Embedding"):
            layers[place] = current
    return layers


def _layers_of_states(
    states: Sequence[int],
    weights: Sequence[int],
    layers: Mapping[int, int],
    call_sites: CallSites,
    sizes: Mapping[int, int],
) -> dict[int, int]:
    """Layers of optimizer states: each call site allocates one as large as each weight, in the weights' order."""
    by_site: dict[str, list[int]] = defaultdict(list)
    for block in states:
        by_site[call_sites.of(block).description].append(block)
    found: dict[int, int] = {}
    for allocated in by_site.values():
        left = iter(weights)
        for block in allocated:
            weight = next((weight for weight in left if sizes[weight] == sizes[block]), None)
            if weight is None:
                break
            if weight in layers:
                found[block] = layers[weight]
    return found


def _layers_of_gradients(
    gradients: Sequence[int], weights: Sequence[int], layers: Mapping[int, int], sizes: Mapping[int, int]
) -> dict[int, int]:
    """Layers of gradients: backward completes them layer by layer, from the last to the first."""
    outside = {sizes[weight] for weight in weights if weight not in layers}
    missing: dict[int, Counter[int]] = defaultdict(Counter)
    for weight in weights:
        if weight in layers and sizes[weight] not in outside:
            missing[layers[weight]][sizes[weight]] += 1
    found: dict[int, int] = {}
    for block in gradients:
        # a size that also occurs outside the layers is ambiguous
        if sizes[block] in outside or not missing:
            continue
        layer = max(missing)
        if not missing[layer][sizes[block]]:
            break
        found[block] = layer
        missing[layer][sizes[block]] -= 1
        if not +missing[layer]:
            del missing[layer]
    return found
