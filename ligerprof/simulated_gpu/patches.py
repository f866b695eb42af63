"""Changes to torch's and other packages' Python code in a process with a simulated GPU; each says why."""

import functools
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Mapping
from traceback import walk_tb
from typing import Any

import torch
from torch._subclasses import fake_tensor

from ligerprof.errors import LigerprofError, UnsupportedError
from ligerprof.runs.recording.imports import after_import_or_now
from ligerprof.runs.recording.settings import say
from ligerprof.simulated_gpu import cudnn
from ligerprof.simulated_gpu.flash_attn import FlashAttnFinder
from ligerprof.simulated_gpu.plans import functions
from ligerprof.simulated_gpu.values import is_skipped, place
from ligerprof.units import MIB

# machine.Machine, which imports this module
Machine = Any
# of the buffer that clears the level-2 cache between measured launches
_FLUSHED_BYTES = 256 * MIB
# called with the arguments of each launch of a Triton kernel
launch_observers: list[Callable[[tuple[Any, ...]], None]] = []
_FLASH_ATTN = re.compile(r"flash[-_]attn|FlashAttention-?2", re.IGNORECASE)
# of huggingface_hub: it does not wait for a network when it is set to offline
_OFFLINE_ERRORS = ("OfflineModeIsEnabled", "LocalEntryNotFoundError")


def patch_process(machine: Machine) -> None:
    """Make all changes."""
    # the first fake tensor of a GPU would initialize it
    fake: Any = fake_tensor
    fake.init_gpu_context = lambda *_: None
    _storages_resize(machine)
    # GradScaler skips a step whose gradients are not finite; these have no values
    scaler: Any = torch.amp.GradScaler
    scaler._maybe_opt_step = lambda _scaler, optimizer, _state, *args, **kwargs: optimizer.step(*args, **kwargs)
    _casts_end_in_order(machine)
    _refusals_in_a_line()
    # functions of torch.jit.script run operator by operator: their fusers compile for a GPU, or would call NVRTC
    torch._C._jit_override_can_fuse_on_gpu(False)  # noqa: FBT003 - positional only
    torch._C._jit_set_texpr_fuser_enabled(False)  # noqa: FBT003 - positional only
    cudnn.install()
    # weights arrive in the order of threads otherwise, which varies on a GPU, too
    os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")
    after_import_or_now("triton.runtime.jit", _leave_out_launches)
    after_import_or_now("vllm.entrypoints.llm", _vllm_is_refused)


def _storages_resize(machine: Machine) -> None:
    """UntypedStorage.resize_ calls CUDA directly; FSDP frees and restores parameters with it."""
    storage_type: Any = torch.UntypedStorage
    resize = storage_type.resize_

    def resize_(storage: torch.UntypedStorage, size_bytes: int) -> Any:
        if storage.device.type != "cuda":
            return resize(storage, size_bytes)
        if size_bytes != storage.nbytes():
            machine.resize(storage, size_bytes)
        return storage

    storage_type.resize_ = resize_
    make = storage_type.__new__

    def new(cls: Any, *arguments: Any, device: Any = None, **named: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return make(cls, *arguments, **({} if device is None else {"device": device}), **named)
        # torch's Python binding makes storages of devices that it was built for
        size_bytes = arguments[0] if arguments else 0
        return functions.empty(size_bytes, dtype=torch.uint8, device=device).untyped_storage()

    storage_type.__new__ = new


def _vllm_is_refused(module: Any) -> None:
    """It measures the memory of a GPU, and runs kernels of its own in other processes."""

    def refuse(*_arguments: Any, **_named: Any) -> None:
        raise UnsupportedError(
            f"{place()}: the simulated GPU does not cover vLLM. Generate with transformers instead"
            " (TRL: use_vllm: false), or run on a GPU."
        )

    module.LLM.__init__ = refuse


def _refusals_in_a_line() -> None:
    """What the machine does not cover ends the program with one line, as an error of a command; so does Ctrl-C."""
    before = sys.excepthook

    def report(kind: Any, error: BaseException, traceback: Any) -> None:
        refusal = _refusal_behind(error)
        if refusal is not None:
            say(refusal + _called_from(traceback, refusal))
        elif not isinstance(error, KeyboardInterrupt):
            before(kind, error, traceback)

    sys.excepthook = report


def _refusal_behind(error: BaseException) -> str | None:
    """The line of a refusal that an exception is or follows from."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, LigerprofError):
            return str(seen)
        if type(seen).__name__ in _OFFLINE_ERRORS:
            first = str(error).splitlines()[0]
            return f"{type(error).__name__}: {first} A simulated run has no network: download what is missing before."
        lacks_flash = isinstance(seen, ImportError) and _FLASH_ATTN.search(str(seen))
        if lacks_flash and FlashAttnFinder not in map(type, sys.meta_path):
            first = str(seen).splitlines()[0].rstrip(".")
            return f"{first}. Add --flash-attn to simulate flash-attn 2 without its package."
        seen = seen.__cause__ or seen.__context__
    return None


def _called_from(traceback: Any, refusal: str) -> str:
    """The user's line, where the refusal names one in a package."""
    packages = sysconfig.get_path("purelib"), sysconfig.get_path("stdlib")
    lines = [
        f"{frame.f_code.co_filename}:{line}"
        for frame, line in walk_tb(traceback)
        if not (frame.f_code.co_filename.startswith(packages) or is_skipped(frame.f_code.co_filename))
    ]
    return "" if not lines or lines[-1] in refusal else f" Called from {lines[-1]}."


def _casts_end_in_order(machine: Machine) -> None:
    """The cache of autocast frees casts of weights in the order of hashes of pointers, which varies on a GPU, too."""
    clear = torch.clear_autocast_cache

    def clear_in_order() -> None:
        with machine.device.giving_back_by_address():
            clear()

    torch.clear_autocast_cache = clear_in_order


def _leave_out_launches(jit: Any) -> None:
    """A kernel of Triton allocates nothing itself, and running it needs a GPU."""
    jit.KernelInterface.__getitem__ = lambda kernel, _grid: functools.partial(_launch, kernel)


def _launch(kernel: Any, *arguments: Any, **named: Any) -> None:
    """The launch of a kernel."""
    while kernel is not None:
        if len(getattr(kernel, "configs", ())) > 1:
            _tune(kernel, {**dict(zip(kernel.arg_names, arguments, strict=False)), **named})
        # heuristics and autotuning wrap a kernel, or each other
        kernel = getattr(kernel, "fn", None)
    for observe in launch_observers:
        observe((*arguments, *named.values()))


def _tune(kernel: Any, given: Mapping[str, Any]) -> None:
    """What `triton.autotune` allocates for a key that is new: copies to restore, and a buffer that clears the L2 cache.

    triton/runtime/autotuner.py, Autotuner.run; triton/testing.py, do_bench; the driver's get_empty_cache_for_benchmark.
    """
    read = {name: value for name, value in given.items() if name in kernel.arg_names}
    dtypes = [str(value.dtype) for value in read.values() if hasattr(value, "dtype")]
    key = (*(read[name] for name in kernel.keys if name in read), *dtypes)
    if key in kernel.cache:
        return
    kernel.cache[key] = kernel.best_config = kernel.configs[0]
    copies = [read[name].clone() for name in kernel.restore_value]
    flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.int8, device="cuda")
    del copies, flushed
