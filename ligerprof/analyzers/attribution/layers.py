"""Decide which decoder layer a block belongs to, and what selective checkpointing keeps of each."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from ligerprof.analyzers.attribution import frames
from ligerprof.analyzers.attribution.phases import DeviceBlocks, phase_of_code
from ligerprof.analyzers.attribution.stacks import CallSite, CallSites, PythonCall
from ligerprof.roles import ROLE_CODES, Phase, Role
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.trace import Flags, Int64s, number_pairs, runs

Chain = tuple[PythonCall, ...]

NO_LAYER = -1

# how deep in the model's calls its loop over the layers may be
_DEEPEST_LOOP = 5


def layers_in_passes(blocks: DeviceBlocks) -> Int64s:
    """The layer of each block that forward or backward allocated, -1 if unknown.

    Without stamps, stacks show the loop over the layers: one call repeats, and under it the lines
    of the layer's own code start over each time. Recomputation runs from the last layer to the first.
    """
    call_sites = blocks.call_sites
    of_site = np.array([NO_LAYER if site.layer is None else site.layer for site in call_sites.sites], dtype=np.int64)
    if (of_site != NO_LAYER).any():
        return of_site[call_sites.site_of]
    return _layers_by_loops(blocks)


def with_layers_of_weights(
    replayed: Replay, call_sites: CallSites, blocks: Int64s, role_codes: Int64s, known: Int64s
) -> Int64s:
    """Add the layers of weights, by the order of their construction, and of their optimizer states and gradients.

    Optimizer states follow the weights in their order; gradients come layer by layer, in sizes
    that add up to a layer's weights.

    Args:
        role_codes: index in `ROLES` of the role of each.
        known: layers of all blocks, from `layers_in_passes`.
    """
    weights, states, gradients = (
        blocks[role_codes == ROLE_CODES[role]] for role in (Role.PARAMETERS, Role.OPTIMIZER_STATES, Role.GRADIENTS)
    )
    gradients = gradients[known[gradients] == NO_LAYER]
    sizes, sites = replayed.requested_bytes, call_sites.sites
    layers = known.copy()
    of_weights = _loop(call_sites.site_of[weights], lambda site: sites[site].stack.build_calls)
    for found in (
        _layers_of_states(states, weights, of_weights, call_sites, sizes),
        _layers_of_gradients(gradients, weights, of_weights, sizes),
    ):
        layers[list(found)] = list(found.values())
    layers[weights[of_weights != NO_LAYER]] = of_weights[of_weights != NO_LAYER]
    return layers


def _loop(site_of: Int64s, chain_of: Callable[[int], Chain]) -> Int64s:
    """The iteration of the loop over the layers that allocated each block, NO_LAYER outside the loop.

    Args:
        site_of: the site of each block, in the order of allocation.
        chain_of: the model's calls behind a site, outermost first.
    """
    best, rounds = np.full(len(site_of), NO_LAYER, dtype=np.int64), 0
    sites, index_of = np.unique(site_of, return_inverse=True)
    chains = [chain_of(site) for site in sites.tolist()]
    for depth in range(_DEEPEST_LOOP):
        heads: dict[Chain, int] = {}
        reach = [heads.setdefault(chain[:depth], len(heads)) if len(chain) > depth else -1 for chain in chains]
        if not heads:
            break
        line = [chain[depth].line if len(chain) > depth else 0 for chain in chains]
        head_of, lines = (np.array(each, dtype=np.int64)[index_of] for each in (reach, line))
        blocks = np.argsort(head_of, kind="stable")
        blocks = blocks[head_of[blocks] >= 0]
        counted, starts = _count_rounds(head_of[blocks], lines[blocks])
        ends = np.append(starts[1:], len(blocks))
        # a loop inside a layer runs as often as the loop over the layers, so the outermost wins, then the first
        most = int(counted[ends - 1].max())
        if most > rounds:
            candidates = np.flatnonzero(counted[ends - 1] == most)
            chosen = candidates[np.argmin(blocks[starts[candidates]])]
            made = slice(int(starts[chosen]), int(ends[chosen]))
            best, rounds = np.full(len(site_of), NO_LAYER, dtype=np.int64), most
            best[blocks[made]] = counted[made]
    return best


def _count_rounds(heads: Int64s, lines: Int64s) -> tuple[Int64s, Int64s]:
    """How often the first line of each head has run again after a later line, and where each head starts."""
    starts = np.flatnonzero(np.append(True, heads[1:] != heads[:-1]))
    first = np.repeat(lines[starts], np.diff(starts, append=len(heads)))
    again = (lines == first) & np.append(False, lines[:-1] > first[:-1])
    again[starts] = False
    rounds = np.cumsum(again)
    return rounds - np.repeat(rounds[starts], np.diff(starts, append=len(heads))), starts


def _layers_by_loops(device: DeviceBlocks) -> Int64s:
    """Layers of the blocks that forward and backward allocated, span by span."""
    layers = np.full(len(device.codes), NO_LAYER, dtype=np.int64)
    last_layer = 0
    # all steps of a training loop allocate in the same order
    known: dict[tuple[Phase | None, int, bytes], tuple[Int64s, Int64s]] = {}
    within = np.flatnonzero(device.replayed.allocated_by >= 0)
    for blocks in runs(within, device.spans[within]):
        phase, sites = phase_of_code(int(device.codes[blocks[0]])), device.call_sites.site_of[blocks]
        key = (phase, last_layer if phase is Phase.BACKWARD else 0, sites.tobytes())
        if key not in known:
            found = _layers_in_span(sites, device.call_sites.sites, phase, last_layer)
            known[key] = np.flatnonzero(found != NO_LAYER), found[found != NO_LAYER]
        places, numbers = known[key]
        if phase is Phase.FORWARD and len(numbers):
            last_layer = int(numbers.max())
        layers[blocks[places]] = numbers
    return layers


def _layers_in_span(site_of: Int64s, sites: Sequence[CallSite], phase: Phase | None, last_layer: int) -> Int64s:
    """Layers of one span's blocks.

    In backward, recomputed layers count down; later allocations belong to the last one, up to the embedding.
    """
    if phase is Phase.FORWARD:
        return _loop(site_of, lambda site: sites[site].stack.model_calls)
    layers = np.full(len(site_of), NO_LAYER, dtype=np.int64)
    numbers = site_of.tolist()
    recomputed = [place for place, site in enumerate(numbers) if sites[site].recomputes]
    if phase is not Phase.BACKWARD or not recomputed:
        return layers
    found = _loop(site_of[recomputed], lambda site: sites[site].stack.model_calls)
    rounds = dict(zip(recomputed, found.tolist(), strict=True))
    current: int | None = None
    for place, site in enumerate(numbers):
        if rounds.get(place, NO_LAYER) != NO_LAYER:
            current = last_layer - rounds[place]
        if current is not None and current >= 0 and not sites[site].node.startswith("Embedding"):
            layers[place] = current
    return layers


def _layers_of_states(
    states: Int64s, weights: Int64s, layers: Int64s, call_sites: CallSites, sizes: Int64s
) -> dict[int, int]:
    """The layers of optimizer states: each call site allocates one as large as each weight, in the weights' order.

    Args:
        layers: of the weights.
        sizes: of all blocks.
    """
    by_site: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for block, size in zip(states.tolist(), sizes[states].tolist(), strict=True):
        by_site[call_sites.of(block).description].append((block, size))
    found: dict[int, int] = {}
    weight_sizes, weight_layers = sizes[weights].tolist(), layers.tolist()
    for allocated in by_site.values():
        after = 0
        for block, size in allocated:
            try:
                weight = weight_sizes.index(size, after)
            except ValueError:
                break
            after = weight + 1
            if weight_layers[weight] != NO_LAYER:
                found[block] = weight_layers[weight]
    return found


def _layers_of_gradients(gradients: Int64s, weights: Int64s, layers: Int64s, sizes: Int64s) -> dict[int, int]:
    """The layers of gradients: backward completes them layer by layer, from the last to the first."""
    weight_sizes, weight_layers = sizes[weights].tolist(), layers.tolist()
    outside = {size for size, layer in zip(weight_sizes, weight_layers, strict=True) if layer == NO_LAYER}
    missing: dict[int, Counter[int]] = defaultdict(Counter)
    for size, layer in zip(weight_sizes, weight_layers, strict=True):
        if layer != NO_LAYER and size not in outside:
            missing[layer][size] += 1
    found: dict[int, int] = {}
    for block, size in zip(gradients.tolist(), sizes[gradients].tolist(), strict=True):
        # a size that also occurs outside the layers is ambiguous
        if size in outside or not missing:
            continue
        layer = max(missing)
        if not missing[layer][size]:
            break
        found[block] = layer
        missing[layer][size] -= 1
        if not +missing[layer]:
            del missing[layer]
    return found


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

    def __init__(self, device: DeviceBlocks, layers: Int64s) -> None:
        call_sites, spans, in_forward = device.call_sites, device.spans, device.in_phase(Phase.FORWARD)
        kept = in_forward & device.outlive_span(np.arange(len(spans)))
        in_region = call_sites.matching(CHECKPOINT_CALL)
        by_policy = call_sites.matching(_SELECTED)
        regions = np.flatnonzero(in_region & in_forward)
        if (layers[regions] >= 0).any():
            # an engine gathers weights on the way, as of the next layer
            regions = regions[layers[regions] >= 0]
        blocks = regions[kept[regions]]
        if call_sites.matching(_KEEPS_INPUTS).any():
            # without the layer, the region of a block is unknown, and so is the last block that it keeps
            by_policy |= in_region & (layers >= 0)
        outputs = _of_groups(blocks, spans, layers, last=True)
        self.selected: Flags = kept & by_policy
        self.selected[outputs] = False
        self.inputs: Flags = np.zeros(len(spans), dtype=bool)
        starts = _of_groups(regions, spans, layers)
        # a layer's output is as large as its input
        sizes = number_pairs(spans + 1, call_sites.sizes[1])
        candidates = np.flatnonzero(kept & np.isin(sizes, sizes[outputs]))
        places = np.searchsorted(candidates, starts) - 1
        starts, before = starts[places >= 0], candidates[places[places >= 0]]
        self.inputs[before[spans[before] == spans[starts]]] = True
        self.outside: Flags = np.zeros(len(spans), dtype=bool)
        if len(regions):
            of_layers = number_pairs(spans + 1, layers + 1)
            self.outside = ~np.isin(of_layers, of_layers[regions])
            # the next layer of an unfinished pass may be another region
            ended = np.append(spans[outputs[1:]] == spans[outputs[:-1]], False)[: len(outputs)]
            ended |= spans[outputs] < device.phases.last_span
            self.outside[outputs] = ended & ~self.inputs[outputs]


def _of_groups(blocks: Int64s, spans: Int64s, layers: Int64s, *, last: bool = False) -> Int64s:
    """The first or last block of each span and layer."""
    ordered = blocks[::-1] if last else blocks
    _, first = np.unique(number_pairs(spans[ordered] + 1, layers[ordered] + 1), return_index=True)
    return np.sort(ordered[first])
