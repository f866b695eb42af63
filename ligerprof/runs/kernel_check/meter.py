"""Count the bytes that a call requests, from the storages that the dispatcher sees."""

import gc
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ligerprof.kernels.spec import KernelMemory


class ByteMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Live and peak requested bytes of storages that are created while it is active, except those of `known`."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet(tensor.untyped_storage() for tensor in known)

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._born(value.untyped_storage())
        return result

    def _born(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        size_bytes = storage.nbytes()
        self.live_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._died, size_bytes)

    def _died(self, size_bytes: int) -> None:
        self.live_bytes -= size_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class CallBytes:
    """The bytes of one call, in the terms of KernelMemory.

    Attributes:
        kept_bytes: kept until backward, outputs excluded; gradients computed in forward included.
    """

    output_bytes: int
    kept_bytes: int
    forward_temporary_bytes: int
    backward_bytes: int

    @classmethod
    def stated(cls, memory: KernelMemory) -> "CallBytes":
        """What a kernel declares."""
        return cls(
            output_bytes=memory.output_bytes,
            kept_bytes=memory.saved_bytes + memory.forward_gradient_bytes,
            forward_temporary_bytes=memory.forward_temporary_bytes,
            backward_bytes=memory.backward_gradient_bytes + memory.backward_temporary_bytes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredCall:
    """A call of a kernel.

    Attributes:
        kept: names of the states that autograd keeps for backward.
        states: names of the inputs that require a gradient, without parameters.
    """

    measured: CallBytes
    kept: frozenset[str]
    states: frozenset[str]


class Meter(Protocol):
    """Counts bytes; `peak_bytes` may be set, to start over."""

    live_bytes: int
    peak_bytes: int


def measure_call(
    call: Callable[[], tuple[Tensor, ...]],
    given: Iterable[Tensor],
    wanted: list[Tensor],
    *,
    meter: Meter | None = None,
) -> CallBytes:
    """One call with its backward.

    Args:
        given: the tensors that exist before the call.
        wanted: the inputs whose gradients backward computes.
        meter: counts the bytes, if it is active already; None: a `ByteMeter` does.
    """
    given = list(given)
    if meter is None:
        with ByteMeter(given) as counted:
            return measure_call(call, given, wanted, meter=counted)
    known = {value.untyped_storage() for value in given}
    given_bytes = meter.peak_bytes = meter.live_bytes
    outputs = call()
    output_bytes = sum(storage.nbytes() for output in outputs if (storage := output.untyped_storage()) not in known)
    # Triton's interpreter leaves reference cycles that hold the launch's tensors
    gc.collect(0)
    kept_bytes, forward_peak_bytes = meter.live_bytes - given_bytes, meter.peak_bytes - given_bytes
    differentiable = [output for output in outputs if output.requires_grad]
    gradients = [torch.ones_like(output) for output in differentiable]
    meter.peak_bytes = start_bytes = meter.live_bytes
    made = torch.autograd.grad(differentiable, wanted, gradients)
    backward_bytes = meter.peak_bytes - start_bytes
    del made
    return CallBytes(
        output_bytes=output_bytes,
        kept_bytes=kept_bytes - output_bytes,
        forward_temporary_bytes=forward_peak_bytes - kept_bytes,
        backward_bytes=backward_bytes,
    )
