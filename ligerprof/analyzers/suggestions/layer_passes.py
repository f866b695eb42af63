"""Find the forward passes of layers, what each saves for backward, and when its backward runs."""

from dataclasses import dataclass

import numpy as np

from ligerprof.analyzers.attribution.layers import NO_LAYER
from ligerprof.analyzers.attribution.phases import EventPhases, phase_code
from ligerprof.roles import Phase
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.trace import Int64s

# a layer's output is its last tensor that lives on, unless that is far smaller than what the layer saves
_OUTPUT_SHARE = 16
_NONE = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPasses:
    """Forward passes of layers, in order; columns have one entry per pass.

    Attributes:
        span: the span of the forward phase that each pass belongs to.
        first: event of its first allocation.
        end: event of the first allocation after it, or the end of the span.
        output: block of its output, -1 if unknown.
        output_bytes: size of that block.
        rise_bytes: how far allocated memory rose within the pass.
        backward_first: event that first frees a block that the pass saved, in the next backward phase; -1 without.
        backward_last: event that frees the last one.
        recompute: the last event before `backward_first` at which backward of later operations frees a block.
        saved: blocks that live on after their pass, outputs excluded.
        saved_by: the pass of each of them.
    """

    span: Int64s
    first: Int64s
    end: Int64s
    output: Int64s
    output_bytes: Int64s
    rise_bytes: Int64s
    backward_first: Int64s
    backward_last: Int64s
    recompute: Int64s
    saved: Int64s
    saved_by: Int64s

    def __len__(self) -> int:
        return len(self.span)


def find_passes(replayed: Replay, phases: EventPhases, layers: Int64s) -> LayerPasses:
    """Find the passes; `layers` has the layer of each block, -1 for none."""
    in_forward = (replayed.allocated_by >= 0) & (phases.codes_of(replayed.allocated_by) == phase_code(Phase.FORWARD))
    forward = np.flatnonzero(in_forward).astype(np.int64)
    places = np.flatnonzero(layers[forward] != NO_LAYER)
    blocks = forward[places]
    spans = phases.spans_of(replayed.allocated_by[blocks])
    if not len(blocks):
        return _no_passes()
    is_first = np.append(True, (np.diff(layers[blocks]) != 0) | (np.diff(spans) != 0))
    starts = np.flatnonzero(is_first)
    pass_of = np.cumsum(is_first) - 1
    span = spans[starts]
    first = replayed.allocated_by[blocks[starts]]
    end = _ends(replayed, phases, forward, places[np.append(starts[1:], len(blocks)) - 1], span)
    freed = np.where(replayed.freed_by[blocks] < 0, len(replayed.trace), replayed.freed_by[blocks])
    lives_on = freed >= end[pass_of]
    sizes = replayed.block_bytes[blocks]
    largest = np.maximum.reduceat(np.where(lives_on, sizes, 0), starts)
    may_be_output = lives_on & (sizes * _OUTPUT_SHARE >= largest[pass_of])
    output = np.maximum.reduceat(np.where(may_be_output, np.arange(len(blocks)), _NONE), starts)
    is_output = np.zeros(len(blocks), dtype=bool)
    is_output[output[output >= 0]] = True
    freed_span = np.append(phases.spans, phases.last_span + 1)[freed]
    is_saved = lives_on & ~is_output & (freed_span > spans)
    in_backward = is_saved & (freed_span == _next_backward(phases)[span][pass_of])
    backward_first = np.minimum.reduceat(np.where(in_backward, freed, len(replayed.trace)), starts)
    backward_last = np.maximum.reduceat(np.where(in_backward, freed, _NONE), starts)
    backward_first = np.where(backward_last == _NONE, _NONE, backward_first)
    return LayerPasses(
        span=span,
        first=first,
        end=end,
        output=np.where(output >= 0, blocks[output], _NONE),
        output_bytes=np.where(output >= 0, sizes[output], 0),
        rise_bytes=_rises(replayed, first, end),
        backward_first=backward_first,
        backward_last=backward_last,
        recompute=last_before(frees_of_saved(replayed, phases, forward), backward_first),
        saved=blocks[is_saved],
        saved_by=pass_of[is_saved],
    )


def _ends(replayed: Replay, phases: EventPhases, forward: Int64s, last_places: Int64s, span: Int64s) -> Int64s:
    """The event of the next allocation of forward after each pass, or the end of its span."""
    events = np.append(replayed.allocated_by[forward], len(replayed.trace))
    span_ends = np.searchsorted(phases.spans, span, "right")
    ends: Int64s = np.minimum(events[last_places + 1], span_ends)
    return ends


def _next_backward(phases: EventPhases) -> Int64s:
    """The first span of backward after each span; past the last span if there is none."""
    starts = phases.span_starts
    backward = np.flatnonzero(phases.codes[starts] == phase_code(Phase.BACKWARD))
    after = np.searchsorted(backward, np.arange(len(starts)), "right")
    found: Int64s = np.append(backward, phases.last_span + 2)[after]
    return found


def _rises(replayed: Replay, first: Int64s, end: Int64s) -> Int64s:
    """The highest allocated bytes from the first event of each pass to its end, above those before it."""
    bounds = np.column_stack([first, end + 1]).ravel()
    highest = np.maximum.reduceat(np.append(replayed.allocated_bytes, 0), bounds)[::2]
    rises: Int64s = highest - replayed.allocated_bytes[first]
    return rises


def frees_of_saved(replayed: Replay, phases: EventPhases, forward: Int64s) -> Int64s:
    """Events of backward that free a block of forward, ascending."""
    freed = replayed.freed_by[forward]
    freed = freed[freed >= 0]
    return np.sort(freed[phases.codes[freed] == phase_code(Phase.BACKWARD)])


def last_before(events: Int64s, limits: Int64s) -> Int64s:
    """The last of the events before each limit, or the limit itself if there is none."""
    place = np.searchsorted(events, limits, "left") - 1
    if not len(events):
        return limits
    return np.where(place >= 0, events[np.maximum(place, 0)], limits)


def _no_passes() -> LayerPasses:
    none = np.empty(0, dtype=np.int64)
    return LayerPasses(
        span=none,
        first=none,
        end=none,
        output=none,
        output_bytes=none,
        rise_bytes=none,
        backward_first=none,
        backward_last=none,
        recompute=none,
        saved=none,
        saved_by=none,
    )
