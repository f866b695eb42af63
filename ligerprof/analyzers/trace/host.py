"""Split the host's time into launches, waits, other CUDA calls, dispatch, autograd and Python."""

import re

import numpy as np

from ligerprof.analyzers.trace.events import PLAIN, Events, Trace
from ligerprof.analyzers.trace.intervals import NOTHING, Spans, clip, length, union
from ligerprof.words import ExplainedWord


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
