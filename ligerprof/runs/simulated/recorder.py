"""Allocate a block of the simulated device for each fake tensor's storage, and free it with the storage."""

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ligerprof.runs.simulated.device import SimulatedDevice
from ligerprof.runs.simulated.internals import INTERNALS, Call
from ligerprof.simulated_gpu.values import tensors_in
from ligerprof.torch_memory.allocator.blocks import Block

aten = torch.ops.aten

# torch.tensor(...) creates its value in host memory; `to` then copies it to the GPU
_ON_HOST = aten.lift_fresh.default
_OF_NEW_VALUES = (_ON_HOST, aten.detach.default)
_ITEM = aten._local_scalar_dense.default
_EQUAL = aten.equal.default
# what backward functions run on zeros that they have just made: in place, but for subclasses of tensors, such as fake
# ones, by these operators (torch/csrc/autograd/FunctionsManual.cpp, areAnyTensorSubclassLike)
_INTO_ZEROS = frozenset({aten.index_put.default, aten.index_add.default, aten.scatter.src, aten.scatter_add.default})
# autograd in C++ asks for it more often than it calls operators
_DEVICE = torch.ops.prim.device.default

# some versions of torch wrap dispatch modes to exclude them from compilation; tapes' recorder calls this one
_BETWEEN = ("/torch/_compile.py", "/torch/_dynamo/eval_frame.py", "/ligerprof/runs/tapes/record.py")

_PLAIN = frozenset({Tensor, torch.nn.Parameter, FakeTensor})

# references to a storage held only by an input buffer of autograd: the buffer's and this call's
_BUFFER_REFERENCES = 2


class StorageRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode, entered inside a FakeTensorMode: allocates a block per storage and frees it with the storage."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._truth = False
        self._waiting: list[Block] | None = None
        self._held: dict[int, tuple[Block, weakref.ref[Any]]] = {}
        self._thread, self._late = threading.get_ident(), deque[int]()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Avoid a wrapper around each operator, and the import of the compiler: nothing is compiled here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if not _PLAIN.issuperset(types):
            # a DTensor calls operators on its local tensors, which come here again
            return NotImplemented
        if args and type(args[0]) is Tensor and args[0].is_meta:
            # torch.tensor(...) on meta, which FakeTensorMode does not take
            value = torch.empty_strided(args[0].shape, args[0].stride(), dtype=args[0].dtype, device="meta")
            if func in _OF_NEW_VALUES:
                return value
            args = (value, *args[1:])
        return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        call = Call(self._device, func, args, kwargs, self._track)
        internal = INTERNALS.get(func)
        if internal is not None:
            return internal(call)
        if func is _ITEM:
            return self._answer(args[0].dtype)
        if func is _EQUAL:
            # kernels test whether the gradient of the loss is 1; it is
            return True
        overwritten = _overwritten(func, args)
        if overwritten is not None and self._has_block(overwritten):
            return self._run_in_place(call, overwritten)
        return call.run_untracked() if func is _ON_HOST or func.is_view else call.run()

    def locate(self, tensor: Tensor) -> tuple[int, int] | None:
        """Device and address of the block of a tensor's storage, None if it has none."""
        held = self._held.get(tensor.untyped_storage()._cdata)
        return None if held is None else (0, held[0].address)

    @contextmanager
    def answering(self, *, truth: bool) -> Iterator[None]:
        """Return `truth` when code reads the value of a fake bool."""
        before, self._truth = self._truth, truth
        try:
            yield
        finally:
            self._truth = before

    def _answer(self, dtype: torch.dtype) -> float:
        """A value for a fake tensor: masks are not full, and numbers are 1."""
        if dtype == torch.bool:
            return self._truth
        return 1

    def _track(self, value: Any) -> None:
        while self._late:
            self._release(self._late.popleft())
        for tensor in tensors_in(value):
            storage = tensor.untyped_storage()
            key = storage._cdata
            size = storage.nbytes()
            # parameters on "meta" are materialized later
            if not size or key in self._held or _device_of(tensor).type == "meta":
                continue
            self._watch(storage, self._device.allocate(size))

    def _watch(self, storage: torch.UntypedStorage, block: Block) -> None:
        key = storage._cdata
        self._held[key] = (block, weakref.ref(storage, self._reaper(key)))

    def _reaper(self, key: int) -> Callable[[Any], None]:
        def reap(_reference: Any) -> None:
            if threading.get_ident() != self._thread:
                # another thread, such as a profiler's, held the last reference
                self._late.append(key)
                return
            self._release(key)

        return reap

    def _release(self, key: int) -> None:
        block, _ = self._held.pop(key)
        if self._waiting is None:
            self._device.release(block)
        else:
            self._waiting.append(block)

    @contextmanager
    def releasing_by_address(self) -> Iterator[None]:
        """Free storages that end inside in the order of their addresses, where C++ goes by hashes of pointers."""
        waiting = self._waiting = []
        try:
            yield
        finally:
            self._waiting = None
            for block in sorted(waiting, key=lambda block: block.address):
                self._device.release(block)

    def _has_block(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._held

    def _run_in_place(self, call: Call, overwritten: Tensor) -> Tensor:
        """Run an operator that writes to one of its arguments on a GPU, and here to a new tensor: it gets the block."""
        result: Tensor = call.run_untracked()
        block, _ = self._held.pop(overwritten.untyped_storage()._cdata)
        self._watch(result.untyped_storage(), block)
        return result


def _device_of(tensor: Tensor) -> torch.device:
    # the device of a fake tensor is a dispatched call
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


def _overwritten(func: Any, args: Sequence[Any]) -> Tensor | None:
    """The argument that autograd writes to on a GPU, where it calls an operator with a new result for fake tensors."""
    if func is aten.add.Tensor:
        return _accumulation_buffer(args)
    return args[0] if func in _INTO_ZEROS and _called_by_engine() else None


def _accumulation_buffer(args: Sequence[Any]) -> Tensor | None:
    """The left operand of an addition that autograd's engine performs in place on a GPU, or None.

    torch/csrc/autograd/input_buffer.cpp, `accumulate`: if only the buffer references a dense tensor and its storage,
    the next gradient is added to it in place. Fake tensors are subclasses, for which the engine never does that.
    """
    left, right = args
    # either may be a number
    if not (isinstance(left, Tensor) and isinstance(right, Tensor)):
        return None
    if left.shape != right.shape or left.dtype != right.dtype:
        return None
    if torch.is_grad_enabled() or torch._C._current_autograd_node() is None or left._is_view():
        return None
    if torch._C._storage_Use_Count(left.untyped_storage()._cdata) != _BUFFER_REFERENCES:
        return None
    return left if _called_by_engine() else None


def _called_by_engine() -> bool:
    """Whether the engine called directly, without Python code (such as a checkpointed layer) in between."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.endswith(_BETWEEN) or frame.f_code.co_filename == __file__:
        assert frame.f_back is not None
        frame = frame.f_back
    return frame.f_code.co_name == "_engine_run_backward"
