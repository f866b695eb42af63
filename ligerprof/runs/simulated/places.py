"""Tell GPU and main memory apart for DeepSpeed's offloading, where every fake tensor is on the CPU.

DeepSpeed names a device where it creates or moves a tensor, and reads `tensor.device`. Its code sees `cuda:0` and
`cpu`, all other code sees the stand-in device alone. The result of an operator is where its inputs are
(`StorageRecorder.following_inputs`).
"""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import _device_constructors

from ligerprof.runs.simulated.recorder import StorageRecorder

# as DeepSpeed's code names them
SIMULATED_GPU, HOST = torch.device("cuda", 0), torch.device("cpu")
_STAND_IN = torch.device("cpu")
_CODE = "deepspeed"


class _TwoPlaces(TorchFunctionMode):
    """A mode for DeepSpeed's code: calls with a device go to the GPU or to main memory."""

    def __init__(self, recorder: StorageRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.to:
            return self._moved(args, kwargs)
        if func is Tensor.cpu:
            return self._moved((args[0], HOST), {})
        device = kwargs.get("device")
        if device is not None and torch.device(device).type in (SIMULATED_GPU.type, HOST.type):
            with self._at(torch.device(device)):
                return func(*args, **{**kwargs, "device": _STAND_IN})
        if func in _device_constructors() and _called_by_deepspeed():
            with self._recorder.at(on_host=True):
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _at(self, device: torch.device) -> AbstractContextManager[None]:
        if device.type == SIMULATED_GPU.type:
            return self._recorder.at(on_host=False)
        # other code means its stand-in device
        names_host = device.type == HOST.type and _called_by_deepspeed()
        return self._recorder.at(on_host=True) if names_host else nullcontext()

    def _moved(self, args: Any, kwargs: Any) -> Any:
        """Tensor.to: a copy if the place differs, which casts without temporaries (ATen/native/cuda/Copy.cu)."""
        tensor, *others = args
        device, dtype = _target(others, kwargs)
        if device is None or (device.type == HOST.type and not _called_by_deepspeed()):
            return tensor.to(*others, **kwargs)
        on_host = device.type == HOST.type
        dtype = dtype or tensor.dtype
        if on_host is self._recorder.is_on_host(tensor):
            return tensor.to(dtype, copy=bool(kwargs.get("copy")))
        with self._recorder.at(on_host=on_host):
            return tensor.to(dtype, copy=True)


@contextmanager
def two_places(recorder: StorageRecorder) -> Iterator[None]:
    """Tell the GPU and main memory apart inside."""
    autograd: Any = torch.autograd
    mode, run_backward = _TwoPlaces(recorder), autograd._engine_run_backward
    modes: Any = _get_current_function_mode_stack

    def run_backward_in_mode(*args: Any, **kwargs: Any) -> Any:
        # torch leaves the mode for calls of `backward`, in which DeepSpeed's hooks run
        active = mode in modes()
        with nullcontext() if active else mode:
            return run_backward(*args, **kwargs)

    device_of: Any = FakeTensor.device

    def place_of(tensor: FakeTensor) -> Any:
        device = device_of.fget(tensor)
        # torch's own code may read it, too, such as that of checkpointing
        if device.type != _STAND_IN.type or not _is_deepspeed(sys._getframe(1)):
            return device
        return HOST if recorder.is_on_host(tensor) else SIMULATED_GPU

    with (
        recorder.following_inputs(),
        mock.patch.object(FakeTensor, "device", property(place_of)),
        mock.patch.object(autograd, "_engine_run_backward", run_backward_in_mode),
        mode,
    ):
        yield


def _target(others: Any, kwargs: Any) -> tuple[torch.device | None, torch.dtype | None]:
    """Device and dtype among the arguments of Tensor.to."""
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    for value in (*others, kwargs.get("other")):
        if isinstance(value, Tensor):
            device, dtype = value.device, value.dtype
        elif isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, (str, torch.device)):
            device = value
    return None if device is None else torch.device(device), dtype


def _called_by_deepspeed() -> bool:
    """Whether the nearest code outside of torch and this file is DeepSpeed's."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name != __name__ and not name.startswith("torch"):
            return _is_deepspeed(frame)
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _is_deepspeed(frame: FrameType) -> bool:
    return bool(frame.f_globals.get("__name__", "").partition(".")[0] == _CODE)
