"""The bytes that one call of a kernel requests, on a simulated GPU."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ligerprof.kernels.device import simulated_device
from ligerprof.kernels.spec import load_entry
from ligerprof.recipe.routing import UNIFORM
from ligerprof.runs.bench.operations import DTYPES, Maker, Tensors
from ligerprof.runs.kernel_check.cases import CHECKED, IN_PLACE, LARGE, PARAMETERS, SIMULATED_GPU
from ligerprof.runs.kernel_check.check import MeasuredCall, measure_call
from ligerprof.runs.outcome import Progress
from ligerprof.simulated_gpu.device import Device
from ligerprof.simulated_gpu.machine import install

_CAPACITY_BYTES = 2**40
# as a patched model computes its loss
_AS_TRAINED = replace(IN_PLACE, shift=True)
# the model makes them, so they are no leaves
_MADE = frozenset({"queries", "keys", "gate", "up", "logits"})


class RequestedBytes:
    """A meter of requested bytes, without rounding and remainders; libraries' workspaces are counted by step."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.live_bytes = self.peak_bytes = 0
        device.observer = self._observe

    def _observe(self, action: str, _address: int, size_bytes: int, _context: object) -> None:
        if self._device.workspace:
            return
        if action == "alloc":
            self.live_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        elif action == "free_completed":
            self.live_bytes -= size_bytes


def requested_meter() -> RequestedBytes:
    """A meter of this process's simulated GPU, a `SIMULATED_GPU` that is empty."""
    machine = install(SIMULATED_GPU)
    machine.restart(SIMULATED_GPU, _CAPACITY_BYTES, None, limit_bytes=None, routing=UNIFORM)
    return RequestedBytes(machine.device)


def call_here(
    _progress: Progress, *, operation: str, entry: str, reference: str, overwrites: bool, search_path: Sequence[str]
) -> MeasuredCall:
    """Call a kernel in this process, which has not simulated before and ends afterwards.

    Args:
        operation: a name in `CHECKED`.
        entry, reference: functions as `module:name`.
        overwrites: whether the kernel is called with `overwrite=True`, as a patched model calls it.
        search_path: where modules are looked for.
    """
    sys.path[:] = search_path
    meter = requested_meter()
    called = CHECKED[operation]
    with simulated_device(sm_count=SIMULATED_GPU.sm_count):
        maker = Maker(dtype=DTYPES["bf16"], generator=torch.Generator("cuda"))
        leaves = called.make(LARGE, maker)
        leaves = {name: value.requires_grad_(name in called.wants) for name, value in leaves.items()}
        given = {name: value.clone() if name in _MADE else value for name, value in leaves.items()}
        kernel = load_entry(entry)
        if overwrites:
            kernel = partial(kernel, overwrite=True)
        call = partial(called.call, kernel, given, _AS_TRAINED)
        # a provider may import its modules in its first call
        call()
        wanted = [given[name] for name in called.wants]
        measured = measure_call(call, [*leaves.values(), *given.values()], wanted, meter=meter)
        names = signature(load_entry(reference)).parameters
        arguments = dict(zip(names, called.arguments(given, IN_PLACE), strict=False))
        return MeasuredCall(
            measured=measured,
            kept=_kept(partial(called.call, kernel, given, IN_PLACE), arguments),
            states=frozenset(_states(arguments)),
        )


def _states(arguments: Tensors) -> dict[str, Tensor]:
    return {
        name: value
        for name, value in arguments.items()
        if isinstance(value, Tensor) and value.requires_grad and name not in PARAMETERS
    }


def _kept(call: partial[Any], arguments: Tensors) -> frozenset[str]:
    """Names of the states that autograd keeps; parameters exist anyway."""
    states = _states(arguments)
    storages: set[int] = set()

    def note(tensor: Tensor) -> Tensor:
        storages.add(tensor.untyped_storage()._cdata)
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = call()
        kept = frozenset(name for name, value in states.items() if value.untyped_storage()._cdata in storages)
    del outputs
    return kept
