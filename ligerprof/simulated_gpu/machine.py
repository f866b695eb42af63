"""Turn this process into one with a simulated GPU: for the rest of its life, torch's `cuda` is the simulation."""

import atexit
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ligerprof.gpus import GpuSpec
from ligerprof.recipe.routing import UNIFORM
from ligerprof.simulated_gpu import compiling, cuda_api, loading
from ligerprof.simulated_gpu.backend import Backend
from ligerprof.simulated_gpu.compiling import fork_from_launchers
from ligerprof.simulated_gpu.device import Device
from ligerprof.simulated_gpu.files import watched
from ligerprof.simulated_gpu.flash_attn import used_stand_ins
from ligerprof.simulated_gpu.host_memory import step_without_values
from ligerprof.simulated_gpu.libraries import install_bitsandbytes, install_deepspeed, install_nvml
from ligerprof.simulated_gpu.loading import StandIns
from ligerprof.simulated_gpu.operators import Operators
from ligerprof.simulated_gpu.patches import patch_process
from ligerprof.simulated_gpu.ranks.group import install_ranks
from ligerprof.simulated_gpu.ranks.world import gpu_of_rank, world_size
from ligerprof.simulated_gpu.saving import Checkpoints
from ligerprof.simulated_gpu.siblings import Siblings
from ligerprof.simulated_gpu.values import Values
from ligerprof.torch_memory.allocator.caching import AllocatorFullError
from ligerprof.torch_memory.allocator.settings import parse_allocator_settings
from ligerprof.torch_memory.distributed import nccl_bytes
from ligerprof.units import GIB, MIB

_LATER_SECONDS = 0.01
_ALLOC_CONFS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class Machine:
    """A process's simulated GPU.

    Args:
        limit_bytes: limit on reserved memory, which may be more than the GPU has; None: what torch gets of the GPU's.
        eager: whether functions of torch.compile run without it.

    Attributes:
        step_time: what is known of the time of a step, for `summary`.
    """

    def __init__(
        self, gpu: GpuSpec, *, limit_bytes: int | None = None, eager: bool = False, routing: str = UNIFORM
    ) -> None:
        self.eager = eager
        settings = parse_allocator_settings(_own_alloc_conf())
        self.device = Device(gpu, capacity_bytes=_capacity(gpu, limit_bytes), settings=settings)
        self.values = Values(self.device.size_of, routing)
        self._backend = Backend()
        self.operators = Operators(self.device, self.values, self._backend.require_own)
        self.operators.message_of = self._message
        self._files = watched()
        self.checkpoints = Checkpoints(self.values, self._files, self.device.synchronize)
        self.stand_ins = StandIns()
        self.siblings = Siblings(self.device, self.values)
        self.step_time: Callable[[], dict[str, Any]] = dict

    def install(self) -> None:
        """Replace torch's CUDA; it cannot be undone."""
        self._backend.install(self._allocate, self._release, self.device.synchronize)
        self._backend.place(*gpu_of_rank())
        cuda_api.install(self.device, self._backend)
        patch_process(self)
        self.operators.register()
        loading.install(self.stand_ins)
        step_without_values()
        # a fused optimizer moves no memory: no event shows that it ran
        register_optimizer_step_pre_hook(partial(self._annotate_step, "START"))
        register_optimizer_step_post_hook(partial(self._annotate_step, "END"))
        self.checkpoints.install()
        self.siblings.install()
        install_ranks(self)
        fork_from_launchers(self.device)
        install_bitsandbytes(self.values.forget)
        install_deepspeed()
        install_nvml(self.device)
        compiling.install(self.device.gpu, self.values, eager=self.eager)
        atexit.register(self._backend.detach)
        # only the main thread may set handlers
        with suppress(ValueError):
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, self._interrupt)

    def _annotate_step(self, stage: str, optimizer: Any, _arguments: Any, _named: Any) -> None:
        self.device.annotate(f"Optimizer.step#{type(optimizer).__name__}.step", stage)

    def restart(
        self, gpu: GpuSpec, capacity_bytes: int, alloc_conf: str | None, *, limit_bytes: int | None, routing: str
    ) -> None:
        """Be another GPU, of which nothing is in use; no tensor may be left on the one before."""
        settings = parse_allocator_settings(alloc_conf)
        self.device.__init__(gpu, capacity_bytes=capacity_bytes, settings=settings, limit_bytes=limit_bytes)  # type: ignore[misc]
        self.values.routing = routing
        self.operators.attention_used.clear()

    def branch(self, limit_bytes: int | None) -> None:
        """Begin again before the first allocation, with another limit and the settings of the environment."""
        observers, tapes, gpu = self.device.observers, self.device.tapes, self.device.gpu
        capacity_bytes = _capacity(gpu, limit_bytes)
        self.restart(gpu, capacity_bytes, _own_alloc_conf(), limit_bytes=None, routing=self.values.routing)
        self.device.observers, self.device.tapes = observers, tapes
        # the recording begins with it
        cuda: Any = torch.cuda
        cuda._initialized = False

    def resize(self, storage: torch.UntypedStorage, size_bytes: int) -> None:
        """Give a storage memory of another size, as UntypedStorage.resize_ does on a GPU."""
        self._backend.resize_storage(storage, size_bytes)

    def summary(self) -> dict[str, Any]:
        """What recording.json says about the simulation; see docs/simulated-gpu.md."""
        gpu = self.device.gpu
        made_up = sorted(self.values.made_up.items(), key=lambda item: (not item[0].is_shape, -item[1]))
        return {
            "gpu": gpu.name,
            "measured_gpu": gpu.measured,
            "routing": self.values.routing,
            "attention": sorted(self.operators.attention_used),
            "made_up": [
                {"what": what, "place": where, "is_shape": is_shape, "is_branch": is_branch, "times": times}
                for (what, where, is_shape, is_branch), times in made_up
            ],
            "stand_ins": self.stand_ins.models,
            "packages": used_stand_ins(),
            "not_written": [] if self._files is None else compiling.without_caches(self._files.new()),
            "unchanged": [] if self._files is None else self._files.unchanged(),
            "pinned_bytes": self._backend.highest_pinned_bytes(),
            "host_bytes": self._backend.highest_host_bytes(),
            "outside_bytes": gpu.memory_bytes - gpu.usable_bytes + nccl_bytes(world_size()),
            **self.step_time(),
        }

    def _allocate(self, size_bytes: int, stream: int) -> int:
        try:
            return self.device.take(size_bytes, stream)
        except AllocatorFullError as full:
            self._backend.ran_out(self._message(full))
            return 0

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt, later if C++ has called the allocator, since ctypes would drop the exception."""
        callbacks = {function.__code__ for function in (Machine._allocate, Machine._release, Device.synchronize)}
        inner = frame
        while inner is not None:
            if inner.f_code in callbacks:
                threading.Timer(_LATER_SECONDS, os.kill, (os.getpid(), number)).start()
                return
            inner = inner.f_back
        signal.default_int_handler(number, frame)

    def _release(self, address: int) -> None:
        self.values.forget(address)
        self.device.give_back(address)

    def _message(self, full: AllocatorFullError) -> str:
        """As CUDACachingAllocator's, so that programs that read it go on as on a GPU."""
        allocator = self.device.allocator
        free, _ = self.device.memory_info()
        return (
            f"CUDA out of memory. Tried to allocate {_torch_size(full.requested_bytes)}. GPU"
            f" {self._backend.index()} has a total capacity of {_torch_size(self.device.gpu.memory_bytes)} of which"
            f" {_torch_size(max(free, 0))} is free. Of the allocated memory {_torch_size(allocator.allocated_bytes)} is"
            f" allocated by PyTorch, and {_torch_size(allocator.reserved_bytes - allocator.allocated_bytes)} is"
            " reserved by PyTorch but unallocated. (This GPU is simulated by ligerprof.)"
        )


def _capacity(gpu: GpuSpec, limit_bytes: int | None) -> int:
    return gpu.usable_bytes if limit_bytes is None else limit_bytes


def _own_alloc_conf() -> str:
    """The allocator settings of this process's environment."""
    return next((os.environ[name] for name in _ALLOC_CONFS if os.environ.get(name)), "")


def _torch_size(size_bytes: int) -> str:
    """As CUDACachingAllocator's format_size, which programs read."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1024, "KiB")):
        if size_bytes > unit:
            return f"{size_bytes / unit:.2f} {name}"
    return f"{size_bytes} bytes"


def install(gpu: GpuSpec, *, limit_bytes: int | None = None, eager: bool = False, routing: str = UNIFORM) -> Machine:
    """Make and install a machine, once per process."""
    if not _INSTALLED:
        _INSTALLED.append(Machine(gpu, limit_bytes=limit_bytes, eager=eager, routing=routing))
        _INSTALLED[0].install()
    return _INSTALLED[0]


def installed() -> Machine | None:
    """The machine of this process, None if it has none."""
    return _INSTALLED[0] if _INSTALLED else None


_INSTALLED: list[Machine] = []
