"""Assign GPU work to phases of the step by what the host was running at launch."""

import re

import numpy as np

from ligerprof.analyzers.trace.events import ABSENT, RECORDED, Events, Numbers, Trace
from ligerprof.analyzers.trace.intervals import NOTHING, Spans, contains, group_indices, union
from ligerprof.words import Word

_NODE = re.compile(r"^autograd::engine::evaluate_function")
_OPTIMIZER = re.compile(r"^Optimizer\.(step|zero_grad)#")


class WorkPhase(Word):
    """Phases of a step in a trace; work outside all spans counts as forward, loss and clipping included."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTATION = "recomputation"
    OPTIMIZER = "optimizer"
    UNKNOWN = "unknown"


PHASES = tuple(WorkPhase)
# phases that require a span in the trace
_SPAN_PHASES = [PHASES.index(phase) for phase in (WorkPhase.BACKWARD, WorkPhase.RECOMPUTATION, WorkPhase.OPTIMIZER)]


def work_phases(trace: Trace, launches: Numbers) -> Numbers | None:
    """The index in PHASES of each piece of GPU work; None if the trace has no spans of phases.

    Recomputation is checkpointing's second forward pass: work launched within an autograd node by
    an operator that records autograd nodes itself. Work that recomputation launches outside such
    operators counts as backward.
    """
    phases = np.where(launches == ABSENT, PHASES.index(WorkPhase.UNKNOWN), PHASES.index(WorkPhase.FORWARD))
    launched = np.flatnonzero(launches != ABSENT)
    calls = launches[launched]
    operators, annotations = trace.operators, trace.annotations
    nodes = _spans_by_thread(operators.where(trace.named(operators, _NODE)))
    recording = _spans_by_thread(operators.where(operators.kinds == RECORDED))
    optimizer = _spans_by_thread(annotations.where(trace.named(annotations, _OPTIMIZER)))
    for thread, indices in group_indices(trace.calls.places[calls]):
        moments, work = trace.calls.starts[calls[indices]], launched[indices]
        in_node, in_recording, in_optimizer = (
            contains(spans.get(thread, NOTHING), moments) for spans in (nodes, recording, optimizer)
        )
        phases[work[in_node]] = PHASES.index(WorkPhase.BACKWARD)
        phases[work[in_node & in_recording]] = PHASES.index(WorkPhase.RECOMPUTATION)
        phases[work[in_optimizer]] = PHASES.index(WorkPhase.OPTIMIZER)
    return phases if np.isin(phases, _SPAN_PHASES).any() else None


def _spans_by_thread(events: Events) -> dict[int, Spans]:
    return {
        thread: union(events.starts[indices], events.ends[indices]) for thread, indices in group_indices(events.places)
    }
