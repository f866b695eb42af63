"""Optimizers of weights in main memory: large tensors there are made and freed, and nothing is computed with them."""

import sys
import weakref
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from ligerprof.simulated_gpu import loading
from ligerprof.simulated_gpu.plans import Planner, functions, realized
from ligerprof.simulated_gpu.values import tensors_in
from ligerprof.torch_memory.saved_tensors import pinned_bytes

_LARGE_BYTES = loading.WEIGHT_BYTES
_LARGE_ELEMENTS = _LARGE_BYTES // torch.float32.itemsize
_PIN, _IS_PINNED = torch.ops.aten._pin_memory.default, torch.ops.aten.is_pinned.default
_PLAIN = frozenset({Tensor, torch.nn.Parameter, FakeTensor})


class HostMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operators on large tensors of floats in main memory compute nothing inside.

    Attributes:
        highest_bytes: the most that tensors made inside held in main memory.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.highest_bytes = self._bytes = 0
        self._planner = Planner()
        self._held: dict[int, tuple[int, Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Avoid a wrapper around each operator, and the import of the compiler: nothing is compiled here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _PLAIN.issuperset(types):
            # a DTensor calls operators on its local tensors, which come here again
            return NotImplemented
        kwargs = kwargs or {}
        if FakeTensor in types or func is _IS_PINNED:
            return func(*args, **kwargs)
        inputs = list(tensors_in((args, tuple(kwargs.values()))))
        if func is _PIN:
            is_large = _is_large(args[0])
            result = functions.empty(args[0].shape, dtype=args[0].dtype, pin_memory=True) if is_large else func(*args)
        elif inputs and all(tensor.device.type == "cpu" for tensor in inputs) and _stays(kwargs):
            result = self._without_values(func, args, kwargs, is_large=any(map(_is_large, inputs)))
        else:
            result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            # masks, as of a check for overflow, are there for a moment
            if tensor.device.type == "cpu" and tensor.dtype is not torch.bool:
                self.watch(tensor)
        return result

    def _without_values(self, func: Any, args: Any, kwargs: Any, *, is_large: bool) -> Any:
        """The result of an operator in main memory; of large tensors, or as one, without its values."""
        inputs: list[Tensor] = []
        try:
            plan = self._planner.plan(func, args, kwargs, inputs)
        except (NotImplementedError, RuntimeError):
            # what depends on values
            if is_large:
                raise
            return func(*args, **kwargs)
        if not is_large and plan.elements[1] < _LARGE_ELEMENTS:
            return func(*args, **kwargs)
        result = realized(plan, inputs)
        # a mask is that of a check, which finds nothing: no value is infinite or not a number
        is_check = bool(inputs) and inputs[0].dtype is torch.bool and func.overloadpacket is not torch.ops.aten.all
        for tensor in tensors_in(result):
            if tensor.numel() == 1 and not func.is_view:
                tensor.fill_(not is_check)
        return result

    def __enter__(self) -> "HostMemory":
        # optimizers step as they are here
        self._weight_bytes, loading.WEIGHT_BYTES = loading.WEIGHT_BYTES, sys.maxsize
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *arguments: Any) -> None:
        loading.WEIGHT_BYTES = self._weight_bytes
        super().__exit__(*arguments)  # type: ignore[no-untyped-call]

    def watch(self, tensor: Tensor) -> None:
        """Count a tensor in main memory as long as it lives."""
        storage = tensor.untyped_storage()
        key, size_bytes = storage._cdata, storage.nbytes()
        if not size_bytes or key in self._held:
            return
        if tensor.is_pinned():
            size_bytes = pinned_bytes(size_bytes)

        def reap(_reference: Any) -> None:
            self._bytes -= self._held.pop(key)[0]

        self._held[key] = (size_bytes, weakref.ref(storage, reap))
        self._bytes += size_bytes
        self.highest_bytes = max(self.highest_bytes, self._bytes)


def step_without_values() -> None:
    """Let the optimizers of weights without values step inside such a mode, from now on."""
    modes: dict[int, HostMemory] = {}

    def begin(optimizer: torch.optim.Optimizer, _arguments: Any, _named: Any) -> None:
        weights = (weight for group in optimizer.param_groups for weight in group["params"])
        if any(loading.has_no_values(getattr(weight, "_local_tensor", weight)) for weight in weights):
            modes[id(optimizer)] = HostMemory().__enter__()

    def end(optimizer: torch.optim.Optimizer, _arguments: Any, _named: Any) -> None:
        mode = modes.pop(id(optimizer), None)
        if mode is not None:
            mode.__exit__(None, None, None)

    register_optimizer_step_pre_hook(begin)
    register_optimizer_step_post_hook(end)


def _is_large(tensor: Tensor) -> bool:
    """Whether a tensor in main memory has no values: a large one of floats, or the mask of one."""
    is_mask = tensor.dtype is torch.bool
    size_bytes = tensor.numel() * torch.float64.itemsize if is_mask else tensor.nbytes
    return tensor.device.type == "cpu" and (is_mask or tensor.is_floating_point()) and size_bytes >= _LARGE_BYTES


def _stays(kwargs: dict[str, Any]) -> bool:
    """Whether a call leaves its result where it is."""
    device = kwargs.get("device")
    return (device is None or torch.device(device).type == "cpu") and not kwargs.get("pin_memory")
