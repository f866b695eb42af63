"""Tell which decoder layer a block belongs to where no stamp names its module: by the order in which layers run."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ligerprof.analyzers.attribution.call_sites import Request, Requests
from ligerprof.analyzers.attribution.phases import Timeline
from ligerprof.analyzers.attribution.stacks import Call
from ligerprof.roles import Phase, Role
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.trace import Int64s

Chain = tuple[Call, ...]

NO_LAYER = -1

# how deep in the calls of a model its loop over the layers may be
_DEEPEST_LOOP = 5


def layers_in_passes(replayed: Replay, requests: Requests, timeline: Timeline, live: Int64s) -> Int64s:
    """The layer of each block that forward or backward made, -1 where unknown: by stamp, or else by loops in stacks.

    A loop over layers shows in the stacks: one call repeats, and under it the lines of the
    layer's own code begin again each time. Recomputations run from the last layer to the first.

    Args:
        live: blocks that are asked for; others made in the same passes come along.
    """
    of_kind = np.array([NO_LAYER if kind.layer is None else kind.layer for kind in requests.kinds], dtype=np.int64)
    if (of_kind != NO_LAYER).any():
        stamped: Int64s = of_kind[requests.kind_of]
        return stamped
    return _layers_by_loops(replayed, requests, timeline, live)


def layers_by_weights(replayed: Replay, requests: Requests, roles: Mapping[int, Role], known: Int64s) -> dict[int, int]:
    """Layers of weights, by the order of their construction, and of what belongs to weights.

    Optimizer states follow the weights in their order; gradients come layer by layer, in sizes
    that make up a layer's weights.

    Args:
        roles: roles of the blocks that are alive.
        known: layers of all blocks as far as passes tell them.
    """
    by_role: dict[Role, list[int]] = defaultdict(list)
    for block, role in roles.items():
        by_role[role].append(block)
    sizes: list[int] = replayed.requested_bytes.tolist()
    weights = by_role[Role.PARAMETERS]
    layers = _loop(weights, [requests.of(block).stack.build_calls for block in weights])
    gradients = [block for block in by_role[Role.GRADIENTS] if known[block] == NO_LAYER]
    return {
        **_layers_of_states(by_role[Role.OPTIMIZER_STATES], weights, layers, requests, sizes),
        **_layers_of_gradients(gradients, weights, layers, sizes),
        **layers,
    }


def _loop(blocks: Sequence[int], chains: Sequence[Chain]) -> dict[int, int]:
    """How often the loop over the layers had run before each block that it made.

    Args:
        blocks: in the order they were made.
        chains: the model's calls behind each, the outermost first.
    """
    best: list[tuple[int, int]] = []
    rounds = 0
    for depth in range(_DEEPEST_LOOP):
        under: dict[Chain, list[tuple[int, int]]] = defaultdict(list)
        for block, chain in zip(blocks, chains, strict=True):
            if len(chain) > depth:
                under[chain[:depth]].append((block, chain[depth].line))
        for made in under.values():
            counted = list(_count_rounds(made))
            # loops inside a layer run as often as the one over the layers: the outermost counts
            if counted[-1][1] > rounds:
                best, rounds = counted, counted[-1][1]
    return dict(best)


def _count_rounds(made: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Blocks with the number of times that the first line came again after later ones."""
    first = made[0][1]
    current, rounds = first, 0
    for block, line in made:
        if line == first and current > first:
            rounds += 1
        current = line
        yield block, rounds


def _layers_by_loops(replayed: Replay, requests: Requests, timeline: Timeline, live: Int64s) -> Int64s:
    """Layers of what forward and backward made, run by run."""
    layers = np.full(len(replayed.block_bytes), NO_LAYER, dtype=np.int64)
    made = replayed.allocated_by
    wanted = set(timeline.runs[made[live[made[live] >= 0]]].tolist())
    last_layer = 0
    # steps of a training loop ask in the same order again and again
    known: dict[tuple[Phase | None, int, bytes], tuple[Int64s, Int64s]] = {}
    for blocks in _blocks_by_run(replayed, timeline):
        phase, kinds = timeline.phase_at(int(made[blocks[0]])), requests.kind_of[blocks]
        key = (phase, last_layer if phase is Phase.BACKWARD else 0, kinds.tobytes())
        if key not in known:
            found = _layers_in_run([requests.kinds[kind] for kind in kinds.tolist()], phase, last_layer)
            known[key] = np.array(list(found), dtype=np.int64), np.array(list(found.values()), dtype=np.int64)
        places, numbers = known[key]
        if phase is Phase.FORWARD and len(numbers):
            last_layer = int(numbers.max())
        if timeline.run_at(int(made[blocks[0]])) in wanted:
            layers[blocks[places]] = numbers
    return layers


def _layers_in_run(asked: Sequence[Request], phase: Phase | None, last_layer: int) -> dict[int, int]:
    """Layers of one run's blocks, by their places in it."""
    if phase is Phase.FORWARD:
        return _loop(range(len(asked)), [request.stack.model_calls for request in asked])
    return _layers_in_backward(asked, last_layer) if phase is Phase.BACKWARD else {}


def _blocks_by_run(replayed: Replay, timeline: Timeline) -> Iterator[Int64s]:
    within = np.flatnonzero(replayed.allocated_by >= 0)
    if not len(within):
        return
    runs = timeline.runs[replayed.allocated_by[within]]
    yield from np.split(within, np.flatnonzero(np.diff(runs)) + 1)


def _layers_in_backward(asked: Sequence[Request], last_layer: int) -> dict[int, int]:
    """Recomputed layers count down; what backward makes after one belongs to it, up to the embedding."""
    again = [place for place, request in enumerate(asked) if request.recomputes]
    if not again:
        return {}
    rounds = _loop(again, [asked[place].stack.model_calls for place in again])
    layers: dict[int, int] = {}
    current: int | None = None
    for place, request in enumerate(asked):
        if place in rounds:
            current = last_layer - rounds[place]
        if current is not None and current >= 0 and not request.node.startswith("Embedding"):
            layers[place] = current
    return layers


def _layers_of_states(
    states: Sequence[int], weights: Sequence[int], layers: Mapping[int, int], requests: Requests, sizes: Sequence[int]
) -> dict[int, int]:
    """An optimizer makes one kind of state for each weight in turn, as large as the weight."""
    by_maker: dict[str, list[int]] = defaultdict(list)
    for block in states:
        by_maker[requests.of(block).shown].append(block)
    found: dict[int, int] = {}
    for made in by_maker.values():
        left = iter(weights)
        for block in made:
            weight = next((weight for weight in left if sizes[weight] == sizes[block]), None)
            if weight is None:
                break
            if weight in layers:
                found[block] = layers[weight]
    return found


def _layers_of_gradients(
    gradients: Sequence[int], weights: Sequence[int], layers: Mapping[int, int], sizes: Sequence[int]
) -> dict[int, int]:
    """Gradients complete one layer after the other, from the last to the first."""
    outside = {sizes[weight] for weight in weights if weight not in layers}
    missing: dict[int, Counter[int]] = defaultdict(Counter)
    for weight in weights:
        if weight in layers and sizes[weight] not in outside:
            missing[layers[weight]][sizes[weight]] += 1
    found: dict[int, int] = {}
    for block in gradients:
        # sizes that occur outside of the layers too cannot be told apart
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
