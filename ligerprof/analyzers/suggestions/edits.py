"""The effect of changes on the allocated bytes: which blocks they remove, shrink, or free earlier."""

import numpy as np

from ligerprof.analyzers.attribution.phases import phase_code
from ligerprof.analyzers.suggestions.case import Case
from ligerprof.analyzers.suggestions.replayed_change import Edit
from ligerprof.roles import Phase, Role
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
_STEP = r"optim\w*/\w+\.py:step$"


def without_old_outputs(case: Case) -> Edit | None:
    """Free what forward made when the backward phase after it ends, if it lives on."""
    replayed, phases = case.replayed, case.attribution.phases
    blocks = case.book.blocks(*_OUTPUT_ROLES)
    blocks = blocks[replayed.allocated_by[blocks] >= 0]
    blocks = blocks[phases.codes_of(replayed.allocated_by[blocks]) == phase_code(Phase.FORWARD)]
    ends = np.array([end for _, end in case.backwards], dtype=np.int64)
    if not len(ends) or not len(blocks):
        return None
    place = np.searchsorted(ends, replayed.allocated_by[blocks], "right")
    inside = place < len(ends)
    blocks, stops = blocks[inside], ends[place[inside]] + 1
    edit = case.edit()
    edit.end(blocks, stops)
    return edit


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
    return np.unique(np.append(starts, [end for _, end in spans])).astype(np.int64)


def _last_before_forward(case: Case, steps: Int64s) -> Int64s:
    """For each end of an optimizer span, the last one before the next forward phase."""
    forward = np.array([start for start, _ in case.spans_of_phase(Phase.FORWARD)], dtype=np.int64)
    group = np.searchsorted(forward, steps)
    last = np.searchsorted(group, group, "right") - 1
    return steps[last]


def with_half_the_batch(case: Case) -> Edit | None:
    """Halve what grows with the batch; gradients then live through the second micro-batch."""
    replayed, edit = case.replayed, case.edit()
    edit.resize(case.book.blocks(*BATCH_ROLES), 2)
    if case.request is not None and case.request.role in BATCH_ROLES:
        edit.request_divisor = 2
    gradients = case.gradients
    forwards = case.spans_of_phase(Phase.FORWARD)
    for start, end in case.backwards:
        before = [first for first, stop in forwards if stop <= start]
        made = case.allocated_within(gradients, before[-1] if before else start, end)
        made = made[(replayed.freed_by[made] < 0) | (replayed.freed_by[made] >= end)]
        if not before or not len(made):
            continue
        sizes, events = replayed.block_bytes[made], replayed.allocated_by[made]
        # gradients of the step before may live until then
        freed = replayed.freed_by[gradients]
        zeroed = int(np.max(freed, where=(before[-1] <= freed) & (freed < start), initial=before[-1] - 1)) + 1
        # the gradient of the first micro-batch, up to this one; then this one, until it is added to the first
        edit.hold(sizes, np.full(len(made), zeroed), events + 1)
        edit.hold(sizes, events + 1, _added_at(case, made, start, end) + 1)
    if case.request is not None and forwards and (not case.backwards or case.backwards[-1][0] < forwards[-1][0]):
        _hold_gradients_of_parameters(case, edit, forwards[-1][0])
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
    first, last = np.searchsorted(case.replayed.allocated_by, (start, end))
    for place in np.flatnonzero(events < start).tolist():
        # a fused loss makes it in forward
        twins = first + np.flatnonzero(case.sizes(np.arange(first, last)) == case.sizes(gradients[[place]]))
        added[place] = case.replayed.allocated_by[twins[-1]] if len(twins) else start
    return added


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
