"""The effect of dividing what DDP holds on every rank: optimizer states alone, or weights and gradients as well."""

from collections import Counter

import numpy as np

from ligerprof.analyzers.suggestions.case import Case
from ligerprof.analyzers.suggestions.replayed_change import Edit
from ligerprof.roles import Phase, Role
from ligerprof.snapshots.trace import Int64s
from ligerprof.torch_memory.allocator.settings import MIN_BLOCK_BYTES

# a recording does not contain how many ranks there are, and more save more
RANKS = 2
# fsdp/_fully_shard/_fsdp_param_group.py: while a group runs, its weights and the buffer of the next all-gather; while
# weights are copied out of that buffer, the one before is alive, too; in backward, the previous group's reduction
_GATHERED, _COPIED_OUT, _REDUCED = 2, 3, 1
_LEAST_LAYERS = 2
# of one backward pass; more would take long to compare
_MOST_GRADIENTS = 5_000


def with_divided_states(case: Case) -> Edit | None:
    """Keep the optimizer states of one rank's weights: of the rank that gets most.

    torch/distributed/optim/zero_redundancy_optimizer.py, `_partition_parameters`: weights go, the largest first, to the
    rank that has least.
    """
    states = case.in_training(Role.OPTIMIZER_STATES)
    states = states[case.sizes(states) > MIN_BLOCK_BYTES]
    weights = Counter(case.sizes(case.in_training(Role.PARAMETERS)).tolist())
    per_weight = max(1, round(len(states) / max(1, sum(weights[size] for size in set(case.sizes(states).tolist())))))
    by_size = states[np.argsort(-case.sizes(states), kind="stable")]
    loads, kept = [0] * RANKS, [list[int]() for _ in range(RANKS)]
    for start in range(0, len(by_size), per_weight):
        together = by_size[start : start + per_weight]
        rank = loads.index(min(loads))
        loads[rank] += int(case.sizes(together).sum())
        kept[rank] += together.tolist()
    if not sum(loads):
        return None
    edit = case.edit()
    edit.remove(np.setdiff1d(states, kept[loads.index(max(loads))]))
    temporaries = case.in_training(Role.OPTIMIZER_TEMPORARIES)
    edit.set_size(temporaries, case.replayed.block_bytes[temporaries] * max(loads) // sum(loads))
    return edit


def with_sharded_model(case: Case) -> Edit | None:
    """Shard weights, gradients and optimizer states as `fully_shard` of each layer and the root does, without buckets.

    The weights of a group are gathered while it runs, those of the root from the forward pass to the end of backward;
    gradients are whole until the group's backward pass has ended.
    """
    edit, replayed = case.edit(), case.replayed
    gradients = case.gradients
    buckets = case.in_training(Role.COMMUNICATION)
    if not len(buckets) or not case.backwards:
        return None
    edit.remove(buckets)
    divided = case.in_training(Role.PARAMETERS, Role.OPTIMIZER_STATES, Role.OPTIMIZER_TEMPORARIES)
    edit.resize(divided[case.sizes(divided) > MIN_BLOCK_BYTES], RANKS)
    model_bytes = int(case.sizes(case.in_training(Role.PARAMETERS)).sum())
    forwards = case.spans_of_phase(Phase.FORWARD)
    for start, end in case.backwards:
        made = case.allocated_within(gradients, start, end)
        made = made[edit.stops(made) > end]
        if not len(made):
            # the phase of a communication hook
            continue
        span = max((span for span in forwards if span[0] < start), default=None)
        layers = None if span is None else _layers(case, made, span)
        if span is None or layers is None:
            return None
        groups, ends = layers
        events, sizes, stops = replayed.allocated_by[made], replayed.block_bytes[made], edit.stops(made)
        reduced = np.append(ends, end)[groups] + 1
        edit.release(sizes - sizes // RANKS, np.minimum(reduced, stops), stops)
        layer_bytes = np.bincount(groups[groups >= 0], weights=sizes[groups >= 0]).astype(np.int64)
        begins = np.append(events[groups < 0][events[groups < 0] < ends[0]][-1:], ends[:-1])[-len(ends) :]
        begins = np.append(np.full(len(ends) - len(begins), start), begins)
        edit.hold((_GATHERED + _REDUCED) * layer_bytes, begins + 1, ends + 1)
        root_bytes = max(0, model_bytes - int(layer_bytes.sum()))
        edit.hold(root_bytes, np.array([span[0] + 1]), np.array([end + 1]))
        _gather_in_forward(case, edit, layer_bytes, span)
    return edit


def _layers(case: Case, made: Int64s, forward: tuple[int, int]) -> tuple[Int64s, Int64s] | None:
    """The layer of each gradient in the order in which backward runs them, -1 for the root; and the end of each layer.

    As many runs of gradients follow each other with the same sizes as layers ran forward.
    """
    count = int(np.count_nonzero((case.passes.first >= forward[0]) & (case.passes.first < forward[1])))
    sizes = case.sizes(made)
    if count < _LEAST_LAYERS or len(made) > _MOST_GRADIENTS:
        return None
    for each in range(len(sizes) // count, 0, -1):
        # equal to the size in the layer before; then runs of that
        repeated = np.append(0, np.cumsum(sizes[each:] == sizes[:-each]))
        length = (count - 1) * each
        starts = np.flatnonzero(repeated[length:] - repeated[:-length] == length)
        if len(starts):
            first, last = int(starts[0]), int(starts[0]) + each * np.arange(1, count + 1) - 1
            groups = np.full(len(made), -1, dtype=np.int64)
            groups[first : first + count * each] = np.repeat(np.arange(count), each)
            return groups, case.replayed.allocated_by[made[last]]
    return None


def _gather_in_forward(case: Case, edit: Edit, layer_bytes: Int64s, forward: tuple[int, int]) -> None:
    passes = case.passes
    ran = np.flatnonzero((passes.first >= forward[0]) & (passes.first < forward[1]))
    sizes = layer_bytes[::-1]
    edit.hold(_GATHERED * sizes, passes.first[ran] + 1, passes.end[ran] + 1)
    edit.spike(passes.first[ran] + 1, (_COPIED_OUT - _GATHERED) * sizes)
