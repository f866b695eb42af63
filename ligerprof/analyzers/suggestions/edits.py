"""The effect of changes on the allocated bytes: which blocks they remove, shrink, or free earlier."""

import re
from bisect import bisect_right
from collections import Counter

import numpy as np

from ligerprof.analyzers.attribution import frames
from ligerprof.analyzers.attribution.layers import NO_LAYER
from ligerprof.analyzers.attribution.phases import phase_code
from ligerprof.analyzers.suggestions.case import Case, Edit, LayerPasses
from ligerprof.roles import Phase, Role
from ligerprof.snapshots.trace import Flags, Int64s
from ligerprof.torch_memory.allocator.settings import MIN_BLOCK_BYTES

BATCH_ROLES = (
    Role.CHECKPOINTS,
    Role.ACTIVATIONS,
    Role.ATTENTION_TEMPORARIES,
    Role.LOGITS,
    Role.SHIFT_LOGITS,
    Role.CE_TEMPORARIES,
    Role.INPUTS,
)
_OUTPUT_ROLES = (Role.LOGITS, Role.SHIFT_LOGITS, Role.CE_TEMPORARIES, Role.ACTIVATIONS, Role.CHECKPOINTS)
# by how much the suggested buckets of DeepSpeed are smaller
BUCKET_DIVISOR = 10
_ENGINE = r"deepspeed/runtime/zero/"
_BUCKETS = r"zero/(?:stage_1_and_2|stage3)\.py:(?:setup_buckets|_setup_for_real_optimizer)$"
_STAGE_1_OR_2 = r"deepspeed/runtime/zero/stage_1_and_2\.py$"
# passes that leave something behind, in a program that keeps outputs
_LEAST_PASSES = 2
_STEP = r"optim\w*/\w+\.py:step$"


def without_old_outputs(case: Case) -> Edit | None:
    """Free what forward made when the backward phase after it ends, if it lives into the next forward phase."""
    blocks, lived = _left_behind(case)
    blocks = blocks[(lived <= 1) & ~np.isin(blocks, _kept(case))]
    ends = np.array([end for _, end in case.backwards], dtype=np.int64)
    if not len(ends) or not len(blocks):
        return None
    place = np.searchsorted(ends, case.replayed.allocated_by[blocks], "right")
    inside = place < len(ends)
    return case.edit().end(blocks[inside], ends[place[inside]] + 1)


def without_kept_outputs(case: Case) -> Edit | None:
    """Free what forward made when the next forward phase begins, if the program keeps it in pass after pass."""
    blocks, lived = _left_behind(case)
    # the last pass has had no time to outlive a second one
    kept = (lived > 1) | ((lived == 1) & _outlive_backward(case, blocks))
    # a graph that no backward pass frees is another mistake
    _, pass_of, held = case.once(_held_blocks)
    spans = case.attribution.phases.spans_of(case.replayed.allocated_by[blocks])
    kept &= ~np.isin(spans, case.passes.span[pass_of[held]])
    blocks, lived = blocks[kept], lived[kept]
    starts = case.forward_starts
    place = np.searchsorted(starts, case.replayed.allocated_by[blocks], "right")
    # what only one pass leaves behind is a buffer
    if len(np.unique(place)) < _LEAST_PASSES or len(np.unique(place[lived > 1])) < _LEAST_PASSES - 1:
        return None
    return case.edit().end(blocks, np.append(starts, case.replayed.last_moment)[place] + 1)


def _kept(case: Case) -> Int64s:
    """Outputs and activations that outlive two forward passes, and the like of the last passes."""
    blocks, lived = _left_behind(case)
    places = case.attribution.call_sites.size_at_place
    alike = np.isin(places[blocks], places[blocks[lived > 1]])
    return blocks[(lived > 1) | (alike & _outlive_backward(case, blocks))]


def _outlive_backward(case: Case, blocks: Int64s) -> Flags:
    """Whether each block is alive after the last allocation of backward; a program may free it at its own end."""
    freed, events = case.replayed.freed_by[blocks], case.replayed.allocated_by
    end = case.backwards[-1][1] if case.backwards else case.replayed.last_moment
    before = int(np.searchsorted(events, end))
    last = int(events[before - 1]) if before else -1
    return (freed < 0) | (freed > last)


def _left_behind(case: Case) -> tuple[Int64s, Int64s]:
    """Outputs and activations of forward, caches of generations, and in how many later forward phases each is alive."""
    replayed, starts = case.replayed, case.forward_starts
    caches = np.intersect1d(case.book.blocks(Role.KV_CACHE), case.generation)
    blocks = np.unique(np.append(case.made_in(Phase.FORWARD, case.book.blocks(*_OUTPUT_ROLES)), caches))
    freed = np.where(replayed.freed_by[blocks] < 0, replayed.last_moment, replayed.freed_by[blocks])
    lived = np.searchsorted(starts, freed) - np.searchsorted(starts, replayed.allocated_by[blocks], "right")
    return blocks, lived


def with_earlier_zero_grad(case: Case) -> Edit | None:
    """Free gradients when the optimizer step ends, if they live on into the next forward phase."""
    replayed, blocks, steps = case.replayed, case.gradients, _ends_of_steps(case)
    place = np.searchsorted(steps, replayed.allocated_by[blocks], "right")
    blocks, place = blocks[place < len(steps)], place[place < len(steps)]
    if not len(blocks):
        return None
    # the last step before the next forward phase
    passes = np.searchsorted(case.forward_starts, steps)
    steps = steps[np.searchsorted(passes, passes, "right") - 1][place]
    place = np.searchsorted(case.forward_starts, steps)
    next_forward = np.append(case.forward_starts, replayed.last_moment)[place]
    freed = replayed.freed_by[blocks]
    # those that are never freed are zeroed in place, which another edit would have to follow
    late = freed > next_forward
    return case.edit().end(blocks[late], steps[late] + 1) if late.any() else None


def _ends_of_steps(case: Case) -> Int64s:
    """Moments at which optimizer steps have ended; clipping alone is not a step."""
    starts = case.attribution.phases.optimizer_starts
    spans = case.spans_of_phase(Phase.OPTIMIZER)
    if len(starts):
        spans = [span for span in spans if ((span[0] <= starts) & (starts <= span[1])).any()]
    elif not case.program.has_call(_STEP):
        return starts
    return np.unique(np.append(starts, [end for _, end in spans])).astype(np.int64)


def with_half_the_batch(case: Case) -> Edit | None:
    """Halve what grows with the batch; gradients then live through the second micro-batch."""
    # what a program keeps of both halves is as large as before
    halved = case.in_training(*BATCH_ROLES)
    replayed, edit = case.replayed, case.edit().resize(halved[~np.isin(halved, _kept(case))], 2)
    case.divide_request(edit, 2, *BATCH_ROLES)
    gradients = case.gradients
    forwards = case.spans_of_phase(Phase.FORWARD)
    stops = [stop for _, stop in forwards]
    dropped = np.sort(replayed.freed_by[gradients])
    previous_end = 0
    for start, end in case.backwards:
        passes = bisect_right(stops, start)
        begin = forwards[passes - 1][0] if passes else start
        # a pass may have several spans of backward
        made = case.allocated_within(gradients, max(begin, previous_end), end)
        previous_end = end
        made = made[(replayed.freed_by[made] < 0) | (replayed.freed_by[made] >= end)]
        if not passes or not len(made):
            continue
        sizes, events = replayed.block_bytes[made], replayed.allocated_by[made]
        # gradients of the step before may live until then
        latest = dropped[: np.searchsorted(dropped, start)][-1:]
        zeroed = max([*latest.tolist(), begin - 1]) + 1
        # the gradient of the first micro-batch, up to this one; then this one, until it is added to the first
        edit.hold(sizes, np.full(len(made), zeroed), events + 1)
        edit.hold(sizes, events + 1, _added_at(case, made, start, end) + 1)
    if case.request is not None and forwards and (not case.backwards or case.backwards[-1][0] < forwards[-1][0]):
        # memory ran out in a forward phase: a gradient for each parameter
        size_bytes = case.book.bytes_at(case.request.moment, Role.PARAMETERS)
        edit.hold(size_bytes, np.array([forwards[-1][0]]), np.array([replayed.last_moment + 1]))
    return edit


def _added_at(case: Case, gradients: Int64s, start: int, end: int) -> Int64s:
    """When each gradient is added to the one before: at the next one, or with the other of a weight used twice."""
    events = case.replayed.allocated_by[gradients]
    added = np.append(events[1:], end)
    # a fused loss makes some in forward
    earlier = np.flatnonzero(events < start)
    if len(earlier):
        blocks = np.arange(*np.searchsorted(case.replayed.allocated_by, (start, end)))
        last_of_size = dict(zip(case.sizes(blocks).tolist(), case.replayed.allocated_by[blocks].tolist(), strict=True))
        added[earlier] = [last_of_size.get(size, start) for size in case.sizes(gradients[earlier]).tolist()]
    return added


def with_half_the_evaluation(case: Case) -> Edit:
    """Halve what grows with the batch in evaluations."""
    return case.edit().resize(np.intersect1d(case.book.blocks(*BATCH_ROLES), case.evaluation), 2)


def with_half_the_prompts(case: Case) -> Edit:
    """Halve what grows with the number of prompts, in a program that trains only in its generations."""
    blocks = case.book.blocks(*BATCH_ROLES, Role.KV_CACHE)
    edit = case.edit().resize(np.intersect1d(blocks, case.generation) if case.trains_model else blocks, 2)
    if case.failed_phase is Phase.GENERATION or not case.trains_model:
        case.divide_request(edit, 2, *BATCH_ROLES, Role.KV_CACHE)
    return edit


def with_bucket_views(case: Case) -> Edit | None:
    """End each gradient when the next one is made: it is copied into its bucket."""
    replayed, edit = case.replayed, case.edit()
    gradients = case.gradients
    changed = False
    for start, end in case.backwards:
        made = case.allocated_within(gradients, start, end)
        if len(made):
            edit.end(made, np.append(replayed.allocated_by[made][1:], end) + 1)
            changed = True
    return edit if changed else None


def with_sharded_states_on_host(case: Case) -> Edit:
    """Remove sharded parameters and their optimizer states; a sharded gradient goes to main memory once it is made."""
    edit = case.without(Role.PARAMETERS, Role.OPTIMIZER_STATES, Role.OPTIMIZER_TEMPORARIES)
    moved = with_bucket_views(case)
    if moved is not None:
        edit.add(moved)
    return edit


def with_resharding(case: Case) -> Edit | None:
    """Free the weights that a layer gathers after its forward pass, and gather them again for its backward pass."""
    passes, replayed = case.passes, case.replayed
    blocks = case.made_in(Phase.FORWARD, case.book.blocks(Role.COMMUNICATION))
    place = np.searchsorted(passes.first, replayed.allocated_by[blocks])
    known = place < len(passes)
    blocks, place = blocks[known], place[known]
    events, stops = replayed.allocated_by[blocks], replayed.freed_by[blocks]
    follows = (place > 0) & (events >= passes.first[place - 1]) & (passes.span[place] == passes.span[place - 1])
    of_layers = np.unique(case.sizes(blocks[follows]))
    # the root gathers its own weights before the first layer
    keeps = (stops > passes.backward_first[place]) & (passes.backward_last[place] >= 0)
    keeps &= follows | np.isin(case.sizes(blocks), of_layers)
    blocks, place = blocks[keeps], place[keeps]
    if not len(blocks):
        return None
    edit, sizes = case.edit(), replayed.block_bytes[blocks]
    ends = edit.stops(blocks)
    edit.release(sizes, passes.end[place] + 1, ends)
    # the next layer to run backward is gathered while one runs
    following = np.minimum(place + 1, len(passes) - 1)
    same = passes.span[following] == passes.span[place]
    again = np.where(same, passes.recompute[following], passes.recompute[place]) + 1
    edit.hold(sizes, np.maximum(again, passes.end[place] + 1), passes.backward_last[place] + 1)
    return edit


def with_smaller_buckets(case: Case) -> Edit | None:
    """Divide DeepSpeed's flat buffers for the reduction of gradients by ten."""
    buckets = np.intersect1d(case.blocks_from(_BUCKETS), case.book.blocks(Role.COMMUNICATION))
    if not len(buckets):
        return None
    return case.edit().resize(buckets, BUCKET_DIVISOR)


def with_optimizer_on_host(case: Case) -> Edit:
    """Remove optimizer states and DeepSpeed's partition of the gradients; add the buffer that moves a gradient."""
    replayed = case.replayed
    edit = case.without(Role.OPTIMIZER_STATES, Role.OPTIMIZER_TEMPORARIES)
    # its constructor makes the fp32 copy of the weights
    edit.remove(np.setdiff1d(case.blocks_from(frames.ZERO_CONSTRUCTOR), case.in_training(Role.OPTIMIZER_STATES)))
    gradients = case.gradients
    by_engine = np.intersect1d(gradients, case.blocks_from(_ENGINE))
    edit.remove(by_engine)
    if case.program.has_file(_STAGE_1_OR_2):
        # temp_grad_buffer_for_gpu_offload, as large as the largest weight
        built = np.flatnonzero(case.attribution.device_blocks.in_phase(Phase.BUILD))
        weights = np.setdiff1d(built, case.blocks_from(_ENGINE))
        if len(weights):
            largest = weights[[np.argmax(replayed.block_bytes[weights])]]
            edit.hold(replayed.block_bytes[largest], edit.starts(largest), np.array([replayed.last_moment + 1]))
    return edit


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
    edit = case.edit().remove(np.setdiff1d(states, kept[loads.index(max(loads))]))
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
        passes, sizes = case.passes, layer_bytes[::-1]
        ran = np.flatnonzero((passes.first >= span[0]) & (passes.first < span[1]))
        edit.hold(_GATHERED * sizes, passes.first[ran] + 1, passes.end[ran] + 1)
        edit.spike(passes.first[ran] + 1, (_COPIED_OUT - _GATHERED) * sizes)
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


# what autograd saves outside of layers
_LOSS_ROLES = (Role.ACTIVATIONS, Role.SHIFT_LOGITS, Role.CE_TEMPORARIES)
# programs collect fewer tensors of each layer: keys, values, attention weights, hidden states
_LEAST_PLACES = 5
# a function of the script; what it computes may outlive the recording
_EVALUATES = re.compile(r":(?:\w+_)?(?:eval|evaluate|evaluation|validate|validation)(?:_\w+)?$", re.MULTILINE)


def without_graphs(case: Case) -> Edit | None:
    """End what layers keep for a backward pass that does not run when each layer's forward pass ends."""
    passes = case.passes
    blocks, pass_of, held = case.once(_held_blocks)
    if not held.any():
        return None
    replayed, spans, edit = case.replayed, case.attribution.phases.spans, case.edit()
    saved, saved_by = blocks[held], pass_of[held]
    # a layer's output is the next one's input
    is_output = passes.output[saved_by] == saved
    is_last = np.append(passes.span[1:] != passes.span[:-1], True)
    until = np.where(
        is_output & ~is_last[saved_by], passes.end[np.minimum(saved_by + 1, len(passes) - 1)], passes.end[saved_by]
    )
    edit.end(saved, until + 1)
    # the loss lies behind the layers
    others = case.book.blocks(*_LOSS_ROLES)
    others = others[~np.isin(others, blocks)]
    of_span = case.attribution.phases.spans_of(replayed.allocated_by[others])
    chosen = np.isin(of_span, passes.span[saved_by]) & ~case.end_in_backward(others)
    others = others[chosen]
    edit.end(others, np.searchsorted(spans, of_span[chosen], "right") + 1)
    return edit


def _held_blocks(case: Case) -> tuple[Int64s, Int64s, Flags]:
    """The blocks of layers' forward passes, the pass of each, and whether a graph without backward holds it."""
    replayed, passes = case.replayed, case.passes
    blocks = case.made_in(Phase.FORWARD, np.flatnonzero(case.attribution.program.layers != NO_LAYER))
    pass_of = np.searchsorted(passes.first, replayed.allocated_by[blocks], "right") - 1
    freed = replayed.freed_by[blocks]
    kept = (freed < 0) | (freed > passes.end[pass_of])
    ends_in_backward = kept & case.end_in_backward(blocks)
    sites = case.attribution.call_sites
    chains = [site.stack.script_calls for site in sites.sites]
    trains = {chains[site] for site in np.unique(sites.site_of[blocks[ends_in_backward]]).tolist()}
    # of the last call of a model before backward, a program may keep tensors that outlive backward
    phases = case.attribution.phases
    follows = np.append(phases.codes[phases.span_starts][1:], -1) == phase_code(Phase.BACKWARD)
    followed = (follows[passes.span] & np.append(passes.span[1:] != passes.span[:-1], True))[pass_of]
    trains |= {chains[site] for site in np.unique(sites.site_of[blocks[followed]]).tolist()}
    evaluates = sites.at(lambda site: _EVALUATES.search(site.stack.text) is not None)[blocks]
    evaluates |= np.isin(blocks, case.evaluation)
    differs = np.array([chain not in trains for chain in chains], dtype=bool)[sites.site_of[blocks]]
    held = kept & ~ends_in_backward & np.where(freed < 0, evaluates, differs | evaluates)
    # a pass that ran out of memory has no backward pass either
    failures = np.array(replayed.failures, dtype=np.int64)
    failed = np.searchsorted(failures, passes.end[pass_of]) != np.searchsorted(failures, freed)
    held &= evaluates | ~failed
    places = np.unique(pass_of[held] * (int(sites.place_of.max(initial=0)) + 1) + sites.place_of[blocks[held]])
    counts = np.bincount(places // (int(sites.place_of.max(initial=0)) + 1), minlength=len(passes))
    return blocks, pass_of, held & (counts[pass_of] >= _LEAST_PLACES)


_NO_SPAN = -1

# a layer that is the only one of its kind is not worth a checkpoint
_FEWEST_LAYERS = 2
# first allocated within a layer, but not for its backward
_STAYING_ROLES = (Role.LIBRARY_WORKSPACE, Role.COMMUNICATION, Role.PARAMETERS, Role.GRADIENTS, Role.KV_CACHE)


def with_checkpointing(case: Case) -> Edit | None:
    """Free what each layer saves at the end of its pass, and hold it again while its backward runs."""
    passes = case.passes
    ran_backward = passes.backward_last >= 0
    interrupted = interrupted_passes(case)
    chosen = ran_backward | interrupted
    if np.count_nonzero(chosen) < _FEWEST_LAYERS or not len(passes.saved):
        return None
    edit, sizes = case.edit(), case.replayed.block_bytes
    kept = chosen[passes.saved_by] & ~np.isin(passes.saved, case.book.blocks(*_STAYING_ROLES))
    saved, saved_by = passes.saved[kept], passes.saved_by[kept]
    stops = edit.stops(saved)
    # autocast's copies stay in its cache until the end of the forward pass
    is_cast = np.isin(saved, case.book.blocks(Role.WEIGHT_CASTS))
    span_ends = np.searchsorted(case.attribution.phases.spans, passes.span, "right")
    first_ends = np.where(is_cast, span_ends[saved_by], passes.end[saved_by]) + 1
    edit.release(sizes[saved], np.minimum(first_ends, stops), stops)
    again = ran_backward[saved_by]
    saved, saved_by, stops = saved[again], saved_by[again], stops[again]
    starts = np.maximum(passes.recompute[saved_by], first_ends[again]) + 1
    ends = np.minimum(stops, passes.backward_last[saved_by] + 1)
    edit.hold(sizes[saved], starts, ends)
    held_again = np.bincount(saved_by, weights=sizes[saved], minlength=len(passes)).astype(np.int64)
    moments = passes.recompute[ran_backward] + 1
    edit.spike(moments, np.maximum(passes.rise_bytes - held_again, 0)[ran_backward])
    _keep_inputs(case, edit, passes, ran_backward)
    return edit


def interrupted_passes(case: Case) -> Flags:
    """Passes whose backward did not run because memory ran out in their forward phase or in the backward after it."""
    passes = case.passes
    if case.request is None or not len(passes):
        return np.zeros(len(passes), dtype=bool)
    phases, moment = case.attribution.phases, max(case.request.moment - 1, 0)
    failed = int(phases.spans_of(np.array([moment]))[0])
    if phases.codes[moment] == phase_code(Phase.BACKWARD):
        failed = int(np.max(passes.span, where=passes.span < failed, initial=_NO_SPAN))
    return (passes.span == failed) & (passes.backward_last < 0)


def _keep_inputs(case: Case, edit: Edit, passes: LayerPasses, ran_backward: Flags) -> None:
    """Keep the output of each layer until the backward pass of the next layer ends: it is that layer's input."""
    follows = np.append(passes.span[1:] == passes.span[:-1], False)
    next_last = np.append(passes.backward_last[1:], -1)
    keeps = follows & (passes.output >= 0) & np.append(ran_backward[1:], False)
    blocks, until = passes.output[keeps], next_last[keeps] + 1
    first = np.flatnonzero(np.append(True, passes.span[1:] != passes.span[:-1]) & ran_backward)
    inputs = [(input_of(case, place), int(passes.backward_last[place]) + 1) for place in first.tolist()]
    blocks = np.append(blocks, [block for block, _ in inputs if block >= 0]).astype(np.int64)
    until = np.append(until, [end for block, end in inputs if block >= 0]).astype(np.int64)
    edit.hold(case.replayed.block_bytes[blocks], edit.stops(blocks), until)


def input_of(case: Case, place: int) -> int:
    """The block that the first layer reads: the last of its output's size before it, -1 if there is none."""
    passes, replayed = case.passes, case.replayed
    event = int(passes.first[place])
    first_block = int(np.searchsorted(replayed.allocated_by, event))
    before = np.arange(max(0, first_block - 50), first_block)
    lives = (replayed.freed_by[before] < 0) | (replayed.freed_by[before] >= event)
    alike = before[lives & (replayed.block_bytes[before] == passes.output_bytes[place])]
    return int(alike[-1]) if len(alike) else -1
