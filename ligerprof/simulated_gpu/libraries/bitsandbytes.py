"""bitsandbytes without its CUDA library: its own Python code allocates, and its kernels compute nothing.

Its operators for CUDA (bitsandbytes/backends/cuda/ops.py) make all tensors with torch, and pass their addresses to
functions of a C library. Paged states are memory that CUDA and the host share, outside torch's allocator.
"""

import ctypes
import mmap
from collections.abc import Callable
from typing import Any

from ligerprof.runs.recording.imports import after_import_or_now

# what makes tensors outside torch, or returns more than an error code
_MANAGED, _CONTEXT = "cget_managed_ptr", "get_context"


def install(forget: Callable[[int], None]) -> None:
    """Replace the library when the program imports bitsandbytes.

    Args:
        forget: called with the addresses that a kernel gets, whose values are not known afterwards.
    """
    after_import_or_now("bitsandbytes.cuda_specs", _no_cuda_library)
    after_import_or_now("bitsandbytes.cextension", lambda module: setattr(module, "lib", _Library(module.lib, forget)))


def _no_cuda_library(module: Any) -> None:
    """It loads the library for CPUs."""
    module.get_cuda_specs = lambda: None


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
