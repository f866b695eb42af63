"""The effect of changes on the allocated bytes: which blocks they remove, shrink, or free earlier."""

from bisect import bisect_right

import numpy as np
import numpy.typing as npt

from ligerprof.analyzers.attribution.phases import phase_code
from ligerprof.analyzers.suggestions.case import Case
from ligerprof.analyzers.suggestions.placement import unsplit_after_shrinking
from ligerprof.analyzers.suggestions.replayed_change import Edit
from ligerprof.roles import Phase, Role
from ligerprof.snapshots.distinct import common, distinct, is_among
from ligerprof.snapshots.trace import Int64s

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
_MASTER_COPY = r"\A\S*zero/stage_1_and_2\.py:__init__$"
_BUCKETS = r"zero/(?:stage_1_and_2|stage3)\.py:(?:setup_buckets|_setup_for_real_optimizer)$"
_STAGE_1_OR_2 = r"deepspeed/runtime/zero/stage_1_and_2\.py$"
# passes that leave something behind, in a program that keeps outputs
_LEAST_PASSES = 2
_STEP = r"optim\w*/\w+\.py:step$"


def without_old_outputs(case: Case) -> Edit | None:
    """Free what forward made when the backward phase after it ends, if it lives into the next forward phase."""
    blocks, lived = _left_behind(case)
    blocks = blocks[(lived <= 1) & ~is_among(blocks, _kept(case))]
    ends = np.array([end for _, end in case.backwards], dtype=np.int64)
    if not len(ends) or not len(blocks):
        return None
    place = np.searchsorted(ends, case.replayed.allocated_by[blocks], "right")
    inside = place < len(ends)
    edit = case.edit()
    edit.end(blocks[inside], ends[place[inside]] + 1)
    return edit


def without_kept_outputs(case: Case) -> Edit | None:
    """Free what forward made when the next forward phase begins, if the program keeps it in pass after pass."""
    blocks, lived = _left_behind(case)
    # the last pass has had no time to outlive a second one
    kept = (lived > 1) | ((lived == 1) & _outlive_backward(case, blocks))
    blocks, lived = blocks[kept], lived[kept]
    starts = np.array([start for start, _ in case.spans_of_phase(Phase.FORWARD)], dtype=np.int64)
    place = np.searchsorted(starts, case.replayed.allocated_by[blocks], "right")
    # what only one pass leaves behind is a buffer
    if len(distinct(place)) < _LEAST_PASSES or len(distinct(place[lived > 1])) < _LEAST_PASSES - 1:
        return None
    edit = case.edit()
    edit.end(blocks, np.append(starts, case.replayed.last_moment)[place] + 1)
    return edit


def _kept(case: Case) -> Int64s:
    """Outputs and activations that outlive two forward passes, and the like of the last passes."""
    blocks, lived = _left_behind(case)
    places = case.attribution.call_sites.size_at_place
    alike = is_among(places[blocks], distinct(places[blocks[lived > 1]]))
    kept: Int64s = blocks[(lived > 1) | (alike & _outlive_backward(case, blocks))]
    return kept


def _outlive_backward(case: Case, blocks: Int64s) -> npt.NDArray[np.bool_]:
    """Whether each block is alive after the last allocation of backward; a program may free it at its own end."""
    freed, events = case.replayed.freed_by[blocks], case.replayed.allocated_by
    end = case.backwards[-1][1] if case.backwards else case.replayed.last_moment
    before = int(np.searchsorted(events, end))
    last = int(events[before - 1]) if before else -1
    outlive: npt.NDArray[np.bool_] = (freed < 0) | (freed > last)
    return outlive


def _left_behind(case: Case) -> tuple[Int64s, Int64s]:
    """Outputs and activations of forward, and in how many later forward phases each is still alive."""
    replayed, phases = case.replayed, case.attribution.phases
    blocks = case.book.blocks(*_OUTPUT_ROLES)
    blocks = blocks[phases.codes_of(replayed.allocated_by[blocks]) == phase_code(Phase.FORWARD)]
    starts = np.array([start for start, _ in case.spans_of_phase(Phase.FORWARD)], dtype=np.int64)
    freed = np.where(replayed.freed_by[blocks] < 0, replayed.last_moment, replayed.freed_by[blocks])
    lived = np.searchsorted(starts, freed) - np.searchsorted(starts, replayed.allocated_by[blocks], "right")
    return blocks, lived


def with_earlier_zero_grad(case: Case) -> Edit | None:
    """Free gradients when the optimizer step ends, if they live on into the next forward phase."""
    replayed = case.replayed
    blocks, steps = _stepped_gradients(case)
    if not len(blocks):
        return None
    forward = np.array([start for start, _ in case.spans_of_phase(Phase.FORWARD)], dtype=np.int64)
    place = np.searchsorted(forward, steps)
    next_forward = np.append(forward, replayed.last_moment)[place]
    freed = replayed.freed_by[blocks]
    # those that are never freed are zeroed in place, which another edit would have to follow
    late = freed > next_forward
    edit = case.edit()
    edit.end(blocks[late], steps[late] + 1)
    return edit if late.any() else None


def _stepped_gradients(case: Case) -> tuple[Int64s, Int64s]:
    """Gradients, and the end of the optimizer step after each; those without one are left out."""
    replayed, steps = case.replayed, _ends_of_steps(case)
    blocks = case.gradients
    place = np.searchsorted(steps, replayed.allocated_by[blocks], "right")
    inside = place < len(steps)
    return blocks[inside], _last_before_forward(case, steps)[place[inside]] if len(steps) else steps


def _ends_of_steps(case: Case) -> Int64s:
    """Moments at which optimizer steps have ended; clipping alone is not a step."""
    starts = case.attribution.phases.optimizer_starts
    spans = case.spans_of_phase(Phase.OPTIMIZER)
    if len(starts):
        spans = [span for span in spans if ((span[0] <= starts) & (starts <= span[1])).any()]
    elif not case.program.has_call(_STEP):
        return starts
    return distinct(np.append(starts, [end for _, end in spans])).astype(np.int64)


def _last_before_forward(case: Case, steps: Int64s) -> Int64s:
    """For each end of an optimizer span, the last one before the next forward phase."""
    forward = np.array([start for start, _ in case.spans_of_phase(Phase.FORWARD)], dtype=np.int64)
    group = np.searchsorted(forward, steps)
    last = np.searchsorted(group, group, "right") - 1
    return steps[last]


def with_half_the_batch(case: Case) -> Edit | None:
    """Halve what grows with the batch; gradients then live through the second micro-batch."""
    # what a program keeps of both halves is as large as before
    halved = case.in_training(*BATCH_ROLES)
    replayed, edit = case.replayed, _with_halves(case, halved[~is_among(halved, _kept(case))])
    if case.request is not None and case.request.role in BATCH_ROLES:
        edit.request_divisor = 2
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
        _hold_gradients_of_parameters(case, edit, forwards[-1][0])
    return edit


def _with_halves(case: Case, blocks: Int64s) -> Edit:
    """Halve the sizes of blocks."""
    edit = case.edit()
    edit.resize(blocks, 2)
    unsplit = unsplit_after_shrinking(case, blocks, 2)
    if unsplit is not None:
        edit.shift(unsplit)
    return edit


def _hold_gradients_of_parameters(case: Case, edit: Edit, start: int) -> None:
    """Hold a gradient for each parameter from a forward phase on in which memory ran out."""
    assert case.request is not None
    size_bytes = case.book.bytes_at(case.request.moment, Role.PARAMETERS)
    edit.hold(size_bytes, np.array([start]), np.array([case.replayed.last_moment + 1]))


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
    return _with_halves(case, common(case.book.blocks(*BATCH_ROLES), case.evaluation))


def with_half_the_prompts(case: Case) -> Edit:
    """Halve what grows with the number of prompts."""
    edit = _with_halves(case, case.book.blocks(*BATCH_ROLES, Role.KV_CACHE))
    if case.request is not None and case.request.role in (*BATCH_ROLES, Role.KV_CACHE):
        edit.request_divisor = 2
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
    blocks = case.book.blocks(Role.COMMUNICATION)
    blocks = blocks[case.attribution.phases.codes_of(replayed.allocated_by[blocks]) == phase_code(Phase.FORWARD)]
    place = np.searchsorted(passes.first, replayed.allocated_by[blocks])
    known = place < len(passes)
    blocks, place = blocks[known], place[known]
    events, stops = replayed.allocated_by[blocks], replayed.freed_by[blocks]
    follows = (place > 0) & (events >= passes.first[place - 1]) & (passes.span[place] == passes.span[place - 1])
    of_layers = distinct(case.sizes(blocks[follows]))
    # the root gathers its own weights before the first layer
    keeps = (stops > passes.backward_first[place]) & (passes.backward_last[place] >= 0)
    keeps &= follows | is_among(case.sizes(blocks), of_layers)
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
    buckets = common(case.blocks_from(_BUCKETS), case.book.blocks(Role.COMMUNICATION))
    if not len(buckets):
        return None
    edit = case.edit()
    edit.resize(buckets, BUCKET_DIVISOR)
    return edit


def with_optimizer_on_host(case: Case) -> Edit:
    """Remove optimizer states and DeepSpeed's partition of the gradients; add the buffer that moves a gradient."""
    replayed = case.replayed
    edit = case.without(Role.OPTIMIZER_STATES, Role.OPTIMIZER_TEMPORARIES)
    # its constructor makes the fp32 copy of the weights
    edit.remove(np.setdiff1d(case.blocks_from(_MASTER_COPY), case.in_training(Role.OPTIMIZER_STATES)))
    gradients = case.gradients
    by_engine = common(gradients, case.blocks_from(_ENGINE))
    edit.remove(by_engine)
    if case.program.has_file(_STAGE_1_OR_2):
        # temp_grad_buffer_for_gpu_offload, as large as the largest weight
        codes = case.attribution.phases.codes_of(replayed.allocated_by)
        built = np.flatnonzero((codes == phase_code(Phase.BUILD)) & (replayed.allocated_by >= 0)).astype(np.int64)
        weights = np.setdiff1d(built, case.blocks_from(_ENGINE))
        if len(weights):
            largest = weights[[np.argmax(replayed.block_bytes[weights])]]
            edit.hold(replayed.block_bytes[largest], edit.starts(largest), np.array([replayed.last_moment + 1]))
    return edit
