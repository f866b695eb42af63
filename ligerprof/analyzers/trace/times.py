"""Assign a trace's time: GPU work to phases, idle time to causes, host time to layers."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ligerprof.analyzers.trace.events import ABSENT, PLAIN, RECORDED, Events, Numbers, Times, Trace
from ligerprof.words import ExplainedWord, Word

Spans = tuple[Times, Times]

NOTHING: Spans = (np.empty(0), np.empty(0))


def group_indices(keys: npt.NDArray[np.int64]) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """Yield each distinct key, ascending, with the indices where it occurs; sorts once."""
    order = np.argsort(keys, kind="stable")
    for indices in np.split(order, np.flatnonzero(np.diff(keys[order])) + 1):
        if len(indices):
            yield int(keys[indices[0]]), indices


def clip(starts: Times, ends: Times, window: tuple[float, float]) -> Spans:
    """Clip each span to the window; spans outside it become empty but keep their index."""
    clipped = np.clip(starts, *window)
    return clipped, np.maximum(np.clip(ends, *window), clipped)


def union(starts: Times, ends: Times) -> Spans:
    """Merge spans into sorted spans that neither overlap nor touch."""
    if not len(starts):
        return NOTHING
    order = np.argsort(starts, kind="stable")
    starts, latest = starts[order], np.maximum.accumulate(ends[order])
    opens = np.concatenate(([True], starts[1:] > latest[:-1]))
    closes = np.concatenate((opens[1:], [True]))
    return starts[opens], latest[closes]


def length(spans: Spans) -> float:
    """Total length of spans that do not overlap."""
    return float(np.sum(spans[1] - spans[0]))


def contains(spans: Spans, moments: Times) -> npt.NDArray[np.bool_]:
    """Whether each moment lies in one of the spans, which are sorted and do not overlap."""
    starts, ends = spans
    if not len(starts):
        return np.zeros(len(moments), dtype=np.bool_)
    before = np.searchsorted(starts, moments, side="right") - 1
    return (before >= 0) & (moments < ends[np.maximum(before, 0)])


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


# microseconds; a gap that equals a bound counts in the range above it
SIZE_BOUNDS_US = (0.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 1000.0, float("inf"))


class GapCause(ExplainedWord):
    """Why a device was idle, according to the call that launched its next work.

    The call began after the device became idle (host_late), was in progress then (launching), or
    had ended before (queued: device latency or an order between streams). The call is missing from
    the trace (unknown), or no work follows in the window (end).
    """

    HOST_LATE = "host_late", "host launched late"
    LAUNCHING = "launching", "launch in progress"
    QUEUED = "queued", "between queued kernels"
    UNKNOWN = "unknown", "launch not in the trace"
    END = "end", "after the last kernel"


CAUSES = tuple(GapCause)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gaps:
    """The idle spans of one device within a window, sorted by start.

    Attributes:
        starts, ends: microseconds of the trace's clock.
        causes: index into CAUSES.
        next_work: index of the work that ended the gap; ABSENT for the last gap.
    """

    starts: Times
    ends: Times
    causes: Numbers
    next_work: Numbers

    @property
    def sizes(self) -> Times:
        """Durations in microseconds."""
        return self.ends - self.starts


def find_gaps(work: Events, launches: Numbers, calls: Events, window: tuple[float, float]) -> Gaps:
    """The idle spans of one device: the window less the union of its kernels, copies and fills.

    Args:
        work: the device's work on all streams.
        launches: per piece of work, the index of the call that launched it, or ABSENT.
        calls: the host's calls.
        window: start and end; idle time before the first and after the last work counts.
    """
    order = np.argsort(work.starts, kind="stable")
    order = order[(work.ends[order] > window[0]) & (work.starts[order] < window[1])]
    starts = work.starts[order]
    busy_until = np.maximum.accumulate(np.concatenate(([window[0]], work.ends[order])))
    gap_ends = np.append(starts, window[1])
    is_gap = gap_ends > busy_until
    next_work = np.append(order, ABSENT)[is_gap]
    gap_starts = busy_until[is_gap]
    # the index ABSENT, -1, selects the appended value
    launch = np.append(launches, ABSENT)[next_work]
    began, returned = (np.append(times, 0.0)[launch] for times in (calls.starts, calls.ends))
    causes = {
        GapCause.END: next_work == ABSENT,
        GapCause.UNKNOWN: launch == ABSENT,
        GapCause.HOST_LATE: began >= gap_starts,
        GapCause.LAUNCHING: returned > gap_starts,
    }
    return Gaps(
        starts=gap_starts,
        ends=gap_ends[is_gap],
        causes=np.select(list(causes.values()), list(map(CAUSES.index, causes)), CAUSES.index(GapCause.QUEUED)),
        next_work=next_work,
    )


class HostLayer(ExplainedWord):
    """Layers of host time, innermost first; time in several layers counts in the first of them."""

    LAUNCH = "launch", "calls that launch kernels, copies, fills"
    WAIT = "wait", "calls that wait for the GPU"
    CUDA_CALLS = "cuda_calls", "other CUDA calls"
    DISPATCH = "dispatch", "operators on the CPU, such as aten::mm"
    AUTOGRAD = "autograd", "autograd, including Python that it calls"
    PYTHON = "python", "Python, and time without events"


_LAUNCH = re.compile(r"^(cuda|cu|hip)\w*(Launch|Memcpy|Memset)")
_WAIT = re.compile(r"Synchronize")
_AUTOGRAD = re.compile(r"^(torch::)?autograd::")
# aten::mm, c10d::allreduce_, custom operators; Python functions and autograd nodes have no namespace
_DISPATCHED = re.compile(r"^(?!(torch::)?autograd::)\w+::")


def host_layers(trace: Trace, window: tuple[float, float]) -> dict[HostLayer, float] | None:
    """Microseconds of the window by layer, on the threads that launch GPU work; they sum to the window.

    None if the trace has no launching calls.
    """
    calls, operators = calls_by_layer(trace), trace.operators
    threads = np.unique(calls[HostLayer.LAUNCH].places)
    if not len(threads):
        return None
    in_autograd = (operators.kinds != PLAIN) | trace.named(operators, _AUTOGRAD)
    events = {
        **calls,
        HostLayer.DISPATCH: operators.where(trace.named(operators, _DISPATCHED)),
        HostLayer.AUTOGRAD: operators.where(in_autograd),
    }
    covered: Spans = NOTHING
    layers: dict[HostLayer, float] = {}
    for layer, found in events.items():
        chosen = found.where(np.isin(found.places, threads))
        starts, ends = clip(chosen.starts, chosen.ends, window)
        grown = union(np.append(covered[0], starts), np.append(covered[1], ends))
        layers[layer] = length(grown) - length(covered)
        covered = grown
    layers[HostLayer.PYTHON] = window[1] - window[0] - length(covered)
    return layers


def calls_by_layer(trace: Trace) -> dict[HostLayer, Events]:
    """The CUDA calls of the layers LAUNCH, WAIT and CUDA_CALLS."""
    calls = trace.calls
    launches = trace.named(calls, _LAUNCH)
    waits = trace.named(calls, _WAIT) & ~launches
    return {
        HostLayer.LAUNCH: calls.where(launches),
        HostLayer.WAIT: calls.where(waits),
        HostLayer.CUDA_CALLS: calls.where(~launches & ~waits),
    }
