"""Changes to torch's and other packages' Python code in a process with a simulated GPU; each says why."""

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ligerprof.runs.recording.imports import after_import_or_now

if TYPE_CHECKING:
    from ligerprof.simulated_gpu.machine import Machine


def patch_process(machine: "Machine") -> None:
    """Make all changes."""
    _plans_touch_no_gpu()
    _storages_resize(machine)
    _scalers_go_on()
    after_import_or_now("triton.runtime.jit", _leave_out_launches)


def _plans_touch_no_gpu() -> None:
    """Fake tensors of a GPU would initialize it."""
    import torch._subclasses.fake_tensor as module

    FakeTensorMode.avoid_device_init = True
    fake: Any = module
    fake.init_gpu_context = lambda *_: None


def _storages_resize(machine: "Machine") -> None:
    """UntypedStorage.resize_ calls CUDA directly; FSDP frees and restores parameters with it."""
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size_bytes: int) -> Any:
        if storage.device.type != "cuda":
            return resize(storage, size_bytes)
        if size_bytes != storage.nbytes():
            machine.resize(storage, size_bytes)
        return storage

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]


def _scalers_go_on() -> None:
    """GradScaler skips a step whose gradients are not finite; these have no values."""
    scaler: Any = torch.amp.GradScaler
    scaler._maybe_opt_step = lambda _scaler, optimizer, _state, *args, **kwargs: optimizer.step(*args, **kwargs)


def _leave_out_launches(jit: Any) -> None:
    """A kernel of Triton allocates nothing itself, and running it needs a GPU."""
    jit.KernelInterface.__getitem__ = lambda _kernel, _grid: _launch


def _launch(*_arguments: Any, **_named: Any) -> None:
    """The launch of a kernel."""
