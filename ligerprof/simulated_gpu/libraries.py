"""What the machine replaces of single libraries when the program imports them: bitsandbytes, pynvml and DeepSpeed."""

import ctypes
import mmap
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from ligerprof.runs.recording.imports import after_import_or_now
from ligerprof.simulated_gpu.device import Device

# what makes tensors outside torch, or returns more than an error code
_MANAGED, _CONTEXT = "cget_managed_ptr", "get_context"


def install_bitsandbytes(forget: Callable[[int], None]) -> None:
    """Replace bitsandbytes' CUDA library when the program imports it: its kernels compute nothing.

    Its operators for CUDA (bitsandbytes/backends/cuda/ops.py) make all tensors with torch, and pass their addresses to
    functions of a C library. Paged states are memory that CUDA and the host share, outside torch's allocator.

    Args:
        forget: called with the addresses that a kernel gets, whose values are not known afterwards.
    """
    # it loads the library for CPUs
    after_import_or_now("bitsandbytes.cuda_specs", lambda module: setattr(module, "get_cuda_specs", lambda: None))
    after_import_or_now("bitsandbytes.cextension", lambda module: setattr(module, "lib", _Library(module.lib, forget)))


class _Library:
    """bitsandbytes' library: functions for CPUs are those of the package, others compute nothing."""

    compiled_with_cuda = True

    def __init__(self, library: Any, forget: Callable[[int], None]) -> None:
        self._library, self._forget = library, forget
        # shared memory lives as long as the process, as CUDA's does here
        self._managed: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if "cpu" in name:
            return getattr(self._library, name)
        if name == _MANAGED:
            return self._share
        function = (lambda: 0) if name == _CONTEXT else _Kernel(self._forget)
        setattr(self, name, function)
        return function

    __getitem__ = __getattr__

    def _share(self, size: Any) -> int:
        """Address of memory of the host, of which the operating system hands out no page."""
        memory = mmap.mmap(-1, max(size.value, 1))
        self._managed.append(memory)
        return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class _Kernel:
    """A function of the library; ctypes' attributes `argtypes` and `restype` may be set."""

    def __init__(self, forget: Callable[[int], None]) -> None:
        self._forget = forget

    def __call__(self, *arguments: Any) -> int:
        """No error; what it gets may be written to."""
        for argument in arguments:
            address = argument.value if isinstance(argument, ctypes.c_void_p) else argument
            if type(address) is int:
                self._forget(address)
        return 0


# nvmlReturn_t
_SUCCESS, _NOT_SUPPORTED = 0, 3
# what stays 0, as on a GPU that does nothing, and what only has to succeed
_IDLE = (
    *(f"nvmlDeviceGet{what}" for what in ("UtilizationRates", "Temperature", "PowerUsage", "ComputeRunningProcesses")),
    *("nvmlInit", "nvmlShutdown", "nvmlDeviceGetHandleBy"),
)


def install_nvml(device: Device) -> None:
    """Let pynvml ask the simulated GPU in place of NVIDIA's library."""

    def replace(module: Any) -> None:
        module._LoadNvmlLibrary = lambda: setattr(module, "nvmlLib", _Nvml(device))

    after_import_or_now("pynvml", replace)


class _Nvml:
    """The functions that programs log a GPU with; others are not supported, as many are not on some GPUs."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Callable[..., int]:
        return partial(self._call, name)

    def _call(self, name: str, *arguments: Any) -> int:
        if name.startswith("nvmlDeviceGetCount"):
            arguments[0]._obj.value = 1
        elif name.startswith("nvmlDeviceGetMemoryInfo"):
            free_bytes, total_bytes = self._device.memory_info()
            found = arguments[1]._obj
            found.free, found.total, found.used = free_bytes, total_bytes, total_bytes - free_bytes
        elif name == "nvmlDeviceGetName":
            arguments[1].value = self._device.gpu.title.encode()
        elif not name.startswith(_IDLE):
            return _NOT_SUPPORTED
        return _SUCCESS


def install_deepspeed() -> None:
    """Change DeepSpeed's modules when the program imports them."""
    after_import_or_now(
        "deepspeed.ops.adam.cpu_adam", lambda module: setattr(module, "CPUAdamBuilder", _UncompiledAdam)
    )
    after_import_or_now("deepspeed.comm.torch", _keep_inputs)


class _UncompiledAdam:
    """DeepSpeed's builder of DeepSpeedCPUAdam's operator, which returns one that does nothing.

    It would update weights in main memory, which have no values here.
    """

    def load(self) -> Any:
        return SimpleNamespace(**dict.fromkeys(("create_adam", "adam_update", "destroy_adam"), lambda *_: None))


def _keep_inputs(module: Any) -> None:
    """NCCL keeps the inputs of asynchronous all-gathers until the code waits (TensorShelf in ProcessGroupNCCL.cpp)."""
    module.TorchBackend.all_gather_into_tensor = _keeping_input(module.TorchBackend.all_gather_into_tensor)


class _Gathering:
    """An all-gather that has not been waited for, with its input."""

    def __init__(self, work: Any, source: Any) -> None:
        self._work, self._source = work, source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def wait(self, *arguments: Any, **options: Any) -> Any:
        self._source = None
        return self._work.wait(*arguments, **options)


def _keeping_input(gather: Callable[..., Any]) -> Callable[..., Any]:
    def all_gather(self: Any, output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        work = gather(self, output_tensor, input_tensor, group=group, async_op=async_op)
        return _Gathering(work, input_tensor) if async_op else work

    return all_gather
