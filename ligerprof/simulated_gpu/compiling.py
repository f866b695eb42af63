"""torch.compile on the simulated GPU: TorchInductor itself decides what a compiled graph allocates.

Dynamo, AOTAutograd and Inductor trace, fuse and write code as on a GPU. The code then runs: it makes its buffers, calls
torch's operators, and launches kernels of Triton, which nobody compiles and which compute nothing.
"""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ligerprof.errors import UnsupportedError
from ligerprof.gpus import GpuSpec
from ligerprof.runs.recording.imports import after_import_or_now
from ligerprof.simulated_gpu.values import Values, place

# which kernel is the fastest, and what trying them allocates, only a GPU tells
_TUNED = "max-autotune"
_THREADS_PER_WARP = 32


def install(gpu: GpuSpec, values: Values, *, eager: bool) -> None:
    """Let torch.compile work, or with `eager` return the functions as they are."""
    if eager:
        torch.compile = _as_it_is
        torch.nn.Module.compile = lambda *_, **_named: None  # type: ignore[method-assign]
        return
    bindings: Any = torch._C
    bindings._dynamo.guards._empty_strided_cuda = _empty_strided
    # Inductor's module of CUDA graphs imports it, also where there are none
    bindings._cuda_CUDAAllocator_AllocatorState = type("AllocatorState", (), {})
    after_import_or_now("triton.runtime.driver", lambda module: _set_driver(module, gpu))
    after_import_or_now("torch._inductor.async_compile", lambda module: _leave_out_kernels(module, values.forget))
    after_import_or_now("torch._inductor", _refuse_tuning)


def _as_it_is(model: Any = None, **_named: Any) -> Any:
    """torch.compile that compiles nothing."""
    return _as_it_is if model is None else model


def _empty_strided(shape: Any, strides: Any, dtype: Any) -> Tensor:
    """A buffer of Inductor's code, which a build of torch without CUDA refuses to make."""
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


def _set_driver(module: Any, gpu: GpuSpec) -> None:
    """Inductor asks Triton what it compiles for."""
    from triton.backends.compiler import GPUTarget

    major, minor = gpu.compute_capability
    target = GPUTarget("cuda", 10 * major + minor, _THREADS_PER_WARP)
    module.driver.set_active(SimpleNamespace(get_current_target=lambda: target))


def _leave_out_kernels(module: Any, forget: Callable[[int], None]) -> None:
    compiler: Any = module.AsyncCompile
    compiler.triton = lambda _self, name, source, *_, **_named: _Kernel(name, source, forget)
    # no processes that compile
    compiler.wakeup = compiler.warm_pool = lambda *_: None


class _Kernel:
    """A kernel that Inductor has written.

    Args:
        name: of its function.
        source: of its module.
        forget: called with addresses whose values are not known afterwards.
    """

    def __init__(self, name: str, source: str, forget: Callable[[int], None]) -> None:
        header = re.search(rf"def {re.escape(name)}\(([^)]*)\)", source)
        changed = re.search(r"'mutated_arg_names': \[([^\]]*)\]", source)
        names = [] if header is None else [each.partition(":")[0].strip() for each in header[1].split(",")]
        written = "" if changed is None else changed[1]
        self._only_read = {
            index for index, each in enumerate(names) if each.startswith("in_ptr") and f"'{each}'" not in written
        }
        self._forget = forget

    def run(self, *arguments: Any, **_named: Any) -> None:
        """The launch."""
        for index, argument in enumerate(arguments):
            if isinstance(argument, Tensor) and index not in self._only_read:
                self._forget(argument.untyped_storage().data_ptr())


def _refuse_tuning(module: Any) -> None:
    options = module.list_mode_options

    def list_mode_options(mode: str | None = None, *others: Any) -> Any:
        if mode is not None and mode.startswith(_TUNED):
            raise UnsupportedError(
                f"{place()}: the simulated GPU does not cover torch.compile(mode={mode!r})."
                " Use the default mode, or add --eager to simulate the code without torch.compile."
            )
        return options(mode, *others)

    module.list_mode_options = list_mode_options
