"""The peak with gradient checkpointing: layers keep their inputs, and run again in backward."""

import numpy as np
from numpy.typing import NDArray

from ligerprof.analyzers.attribution.phases import phase_code
from ligerprof.analyzers.suggestions.case import Case
from ligerprof.analyzers.suggestions.layer_passes import LayerPasses
from ligerprof.analyzers.suggestions.replayed_change import Edit
from ligerprof.roles import Phase, Role
from ligerprof.snapshots.distinct import is_among

Flags = NDArray[np.bool_]
_NO_SPAN = -1

# a layer that is the only one of its kind is not worth a checkpoint
_LEAST_LAYERS = 2
# first allocated within a layer, but not for its backward
_STAYING_ROLES = (Role.LIBRARY_WORKSPACE, Role.COMMUNICATION, Role.PARAMETERS, Role.GRADIENTS, Role.KV_CACHE)


def with_checkpointing(case: Case) -> Edit | None:
    """Free what each layer saves at the end of its pass, and hold it again while its backward runs."""
    passes = case.passes
    ran_backward = passes.backward_last >= 0
    interrupted = interrupted_passes(case)
    chosen = ran_backward | interrupted
    if np.count_nonzero(chosen) < _LEAST_LAYERS or not len(passes.saved):
        return None
    edit, sizes = case.edit(), case.replayed.block_bytes
    kept = chosen[passes.saved_by] & ~is_among(passes.saved, case.book.blocks(*_STAYING_ROLES))
    saved, saved_by = passes.saved[kept], passes.saved_by[kept]
    stops = edit.stops(saved)
    # autocast's copies stay in its cache until the end of the forward pass
    is_cast = is_among(saved, case.book.blocks(Role.WEIGHT_CASTS))
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
    interrupted: Flags = (passes.span == failed) & (passes.backward_last < 0)
    return interrupted


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
