"""Split the host's time into launches, waits, other CUDA calls, dispatch, autograd and Python."""

import re
from enum import Enum

import numpy as np

from ligerprof.analyzers.trace.events import ABSENT, PLAIN, RECORDED, Events, Numbers, Trace
from ligerprof.analyzers.trace.intervals import NOTHING, Spans, clip, group_indices, joined, length, union


class HostLayer(str, Enum):
    """Layers of host time, innermost first; time in several layers counts in the first of them."""

    LAUNCH = "launch"
    WAIT = "wait"
    CUDA_CALLS = "cuda_calls"
    DISPATCH = "dispatch"
    AUTOGRAD = "autograd"
    PYTHON = "python"


LAYER_MEANINGS: dict[HostLayer, str] = {
    HostLayer.LAUNCH: "calls that launch kernels, copies, fills",
    HostLayer.WAIT: "calls that wait for the GPU",
    HostLayer.CUDA_CALLS: "other CUDA calls",
    HostLayer.DISPATCH: "operators on the CPU, such as aten::mm",
    HostLayer.AUTOGRAD: "autograd, including Python that it calls",
    HostLayer.PYTHON: "Python, and time without events",
}

_LAUNCH = re.compile(r"^(cuda|cu|hip)\w*(Launch|Memcpy|Memset)")
_WAIT = re.compile(r"Synchronize")
_AUTOGRAD = re.compile(r"^(torch::)?autograd::")
# aten::mm, c10d::allreduce_, custom operators; Python functions and autograd nodes have no namespace
_DISPATCHED = re.compile(r"^(?!(torch::)?autograd::)\w+::")
_BACKWARD = re.compile(r"^autograd::engine::evaluate_function")
_OPTIMIZER = re.compile(r"^Optimizer\.(step|zero_grad)#")


def host_layers(trace: Trace, window: tuple[float, float]) -> dict[HostLayer, float] | None:
    """Microseconds of the window by layer, on the threads that launch GPU work; they sum to the window.

    None if the trace has no launching calls.
    """
    threads = _launching_threads(trace)
    if not len(threads):
        return None
    covered: Spans = NOTHING
    layers: dict[HostLayer, float] = {}
    for layer, spans in _spans_by_layer(trace, threads, window).items():
        grown = joined(covered, spans)
        layers[layer] = length(grown) - length(covered)
        covered = grown
    layers[HostLayer.PYTHON] = window[1] - window[0] - length(covered)
    return layers


def calls_of_layer(trace: Trace, layer: HostLayer) -> Events:
    """The CUDA calls of one layer: LAUNCH, WAIT or CUDA_CALLS."""
    return trace.calls.where(_call_layers(trace) == list(HostLayer).index(layer))


def backward_spans(trace: Trace) -> dict[int, Spans]:
    """When each thread ran autograd nodes, by thread."""
    return _spans_by_thread(trace.operators.where(np.isin(trace.operators.names, _matching(trace, _BACKWARD))))


def recording_spans(trace: Trace) -> dict[int, Spans]:
    """When each thread ran operators that record autograd nodes: forward or recomputation, by thread."""
    return _spans_by_thread(trace.operators.where(trace.operators.kinds == RECORDED))


def optimizer_spans(trace: Trace) -> dict[int, Spans]:
    """When each thread ran an optimizer, from torch's annotations, by thread."""
    return _spans_by_thread(trace.annotations.where(np.isin(trace.annotations.names, _matching(trace, _OPTIMIZER))))


def _spans_by_layer(trace: Trace, threads: Numbers, window: tuple[float, float]) -> dict[HostLayer, Spans]:
    """The spans of each layer except Python, in the order of HostLayer."""
    operators = trace.operators
    in_autograd = (operators.kinds != PLAIN) | np.isin(operators.names, _matching(trace, _AUTOGRAD))
    events = {
        **{layer: calls_of_layer(trace, layer) for layer in (HostLayer.LAUNCH, HostLayer.WAIT, HostLayer.CUDA_CALLS)},
        HostLayer.DISPATCH: operators.where(np.isin(operators.names, _matching(trace, _DISPATCHED))),
        HostLayer.AUTOGRAD: operators.where(in_autograd),
    }
    return {layer: _union_of(found.where(np.isin(found.places, threads)), window) for layer, found in events.items()}


def _launching_threads(trace: Trace) -> Numbers:
    return np.unique(calls_of_layer(trace, HostLayer.LAUNCH).places)


def _call_layers(trace: Trace) -> Numbers:
    """The index of each call's layer."""
    order = list(HostLayer)
    by_name = np.full(len(trace.names) + 1, ABSENT, dtype=np.int64)
    for name in np.unique(trace.calls.names):
        text = trace.names[name]
        layer = (
            HostLayer.LAUNCH if _LAUNCH.match(text) else HostLayer.WAIT if _WAIT.search(text) else HostLayer.CUDA_CALLS
        )
        by_name[name] = order.index(layer)
    return by_name[trace.calls.names]


def _matching(trace: Trace, pattern: re.Pattern[str]) -> Numbers:
    return np.array([index for index, name in enumerate(trace.names) if pattern.search(name)], dtype=np.int64)


def _union_of(events: Events, window: tuple[float, float]) -> Spans:
    return union(*clip(events.starts, events.ends, window))


def _spans_by_thread(events: Events) -> dict[int, Spans]:
    return {
        thread: union(events.starts[indices], events.ends[indices]) for thread, indices in group_indices(events.places)
    }
