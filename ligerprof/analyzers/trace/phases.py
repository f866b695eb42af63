"""Decide which part of the step a piece of GPU work belongs to, by what the host ran when it launched it."""

from enum import Enum

import numpy as np

from ligerprof.analyzers.trace.events import ABSENT, Numbers, Trace
from ligerprof.analyzers.trace.host import backward_spans, optimizer_spans, recording_spans
from ligerprof.analyzers.trace.intervals import NOTHING, contains, places_of_each


class WorkPhase(str, Enum):
    """Parts of a step as a trace tells them apart; what no span names is forward, loss and clipping included."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTATION = "recomputation"
    OPTIMIZER = "optimizer"
    UNKNOWN = "unknown"


PHASES = tuple(WorkPhase)
# work that only a span can tell from forward
_TOLD = [PHASES.index(phase) for phase in (WorkPhase.BACKWARD, WorkPhase.RECOMPUTATION, WorkPhase.OPTIMIZER)]


def work_phases(trace: Trace, launches: Numbers) -> Numbers | None:
    """Of each piece of GPU work the index of its phase in PHASES; None where the trace has no such spans.

    Recomputation is what checkpointing runs again: work launched within a node of backward by an
    operator that leaves nodes for backward itself. What it launches outside of such operators
    counts as backward.
    """
    phases = np.where(launches == ABSENT, PHASES.index(WorkPhase.UNKNOWN), PHASES.index(WorkPhase.FORWARD))
    launched = np.flatnonzero(launches != ABSENT)
    calls = launches[launched]
    backward, recording, optimizer = backward_spans(trace), recording_spans(trace), optimizer_spans(trace)
    for thread, indices in places_of_each(trace.calls.places[calls]):
        moments, mine = trace.calls.starts[calls[indices]], launched[indices]
        in_backward, in_recording, in_optimizer = (
            contains(spans.get(thread, NOTHING), moments) for spans in (backward, recording, optimizer)
        )
        phases[mine[in_backward]] = PHASES.index(WorkPhase.BACKWARD)
        phases[mine[in_backward & in_recording]] = PHASES.index(WorkPhase.RECOMPUTATION)
        phases[mine[in_optimizer]] = PHASES.index(WorkPhase.OPTIMIZER)
    return phases if np.isin(phases, _TOLD).any() else None
