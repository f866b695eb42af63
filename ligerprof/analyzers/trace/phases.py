"""Decide which part of the step a piece of GPU work belongs to, by what the host ran when it launched it."""

from enum import Enum

import numpy as np
import numpy.typing as npt

from ligerprof.analyzers.trace.events import ABSENT, Numbers, Trace
from ligerprof.analyzers.trace.host import backward_spans, optimizer_spans, recording_spans
from ligerprof.analyzers.trace.intervals import contains


class WorkPhase(str, Enum):
    """Parts of a step as a trace tells them apart; what no span names is forward, loss and clipping included."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTATION = "recomputation"
    OPTIMIZER = "optimizer"
    UNKNOWN = "unknown"


PHASES = tuple(WorkPhase)


def work_phases(trace: Trace, launches: Numbers) -> Numbers | None:
    """Of each piece of GPU work the index of its phase in PHASES; None where the trace has no such spans.

    Recomputation is what checkpointing runs again: work launched within a node of backward by an
    operator that leaves nodes for backward itself. What it launches outside of such operators
    counts as backward.
    """
    launched = launches != ABSENT
    threads = np.where(launched, trace.calls.places[launches], ABSENT) if len(trace.calls) else launches
    moments = np.where(launched, trace.calls.starts[launches], 0.0) if len(trace.calls) else np.zeros(len(launches))
    phases = np.where(launched, PHASES.index(WorkPhase.FORWARD), PHASES.index(WorkPhase.UNKNOWN))
    any_span = False
    for thread in np.unique(threads[launched]):
        mine = threads == thread
        in_backward, in_recording, in_optimizer = _inside(trace, int(thread), moments)
        phases[mine & in_backward] = PHASES.index(WorkPhase.BACKWARD)
        phases[mine & in_backward & in_recording] = PHASES.index(WorkPhase.RECOMPUTATION)
        phases[mine & in_optimizer] = PHASES.index(WorkPhase.OPTIMIZER)
        any_span = any_span or bool((mine & (in_backward | in_optimizer)).any())
    return phases if any_span else None


def _inside(trace: Trace, thread: int, moments: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.bool_], ...]:
    spans = (backward_spans, recording_spans, optimizer_spans)
    return tuple(contains(find(trace, thread), moments) for find in spans)
