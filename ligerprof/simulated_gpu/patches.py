"""Changes to torch's and other packages' Python code in a process with a simulated GPU; each says why."""

import functools
import os
import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ligerprof.errors import LigerprofError, UnsupportedError
from ligerprof.runs.recording.imports import after_import_or_now
from ligerprof.runs.recording.messages import say
from ligerprof.simulated_gpu import recurrent
from ligerprof.simulated_gpu.values import place

# machine.Machine, which imports this module
Machine = Any
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "MLFLOW_TRACKING_URI": "",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
    "COMET_MODE": "DISABLED",
    "NEPTUNE_MODE": "debug",
}


def patch_process(machine: Machine) -> None:
    """Make all changes."""
    _plans_touch_no_gpu()
    _storages_resize(machine)
    _scalers_go_on()
    _casts_end_in_order(machine)
    _refusals_in_a_line()
    recurrent.install()
    _compiled_functions(eager=machine.eager)
    # weights arrive in the order of threads otherwise, which varies on a GPU, too
    os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")
    # what models compute is made up, so nobody else may see it
    os.environ.update(_OFFLINE)
    after_import_or_now("triton.runtime.jit", _leave_out_launches)


def _plans_touch_no_gpu() -> None:
    """Fake tensors of a GPU would initialize it."""
    import torch._subclasses.fake_tensor as module

    mode: Any = FakeTensorMode
    mode.avoid_device_init = True
    fake: Any = module
    fake.init_gpu_context = lambda *_: None


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
        return torch.empty(size_bytes, dtype=torch.uint8, device=device).untyped_storage()

    storage_type.__new__ = new


def _scalers_go_on() -> None:
    """GradScaler skips a step whose gradients are not finite; these have no values."""
    scaler: Any = torch.amp.GradScaler
    scaler._maybe_opt_step = lambda _scaler, optimizer, _state, *args, **kwargs: optimizer.step(*args, **kwargs)


def _refusals_in_a_line() -> None:
    """What the machine does not cover ends the program with one line, as an error of a command."""
    before = sys.excepthook

    def report(kind: Any, error: BaseException, traceback: Any) -> None:
        if isinstance(error, LigerprofError):
            say(str(error))
        else:
            before(kind, error, traceback)

    sys.excepthook = report


def _casts_end_in_order(machine: Machine) -> None:
    """The cache of autocast frees casts of weights in the order of hashes of pointers, which varies on a GPU, too."""
    clear = torch.clear_autocast_cache

    def clear_in_order() -> None:
        with machine.device.giving_back_by_address():
            clear()

    torch.clear_autocast_cache = clear_in_order


def _compiled_functions(*, eager: bool) -> None:
    """A compiled function takes other memory than its code; it runs as it is, or stops where it is called."""

    def compile_nothing(model: Any = None, **named: Any) -> Any:
        if model is None:
            return lambda function: compile_nothing(function, **named)
        if eager:
            return model

        @functools.wraps(model if callable(model) else compile_nothing)
        def refuse(*_arguments: Any, **_named: Any) -> Any:
            raise UnsupportedError(
                f"{place()}: the simulated GPU does not cover torch.compile."
                " Add --eager to simulate the code without it."
            )

        return refuse

    torch.compile = compile_nothing
    torch.nn.Module.compile = lambda module, *_, **named: None if eager else compile_nothing(module, **named)()  # type: ignore[method-assign]


def _leave_out_launches(jit: Any) -> None:
    """A kernel of Triton allocates nothing itself, and running it needs a GPU."""
    jit.KernelInterface.__getitem__ = lambda _kernel, _grid: _launch


def _launch(*_arguments: Any, **_named: Any) -> None:
    """The launch of a kernel."""
