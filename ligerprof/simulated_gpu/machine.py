"""Turn this process into one with a simulated GPU: for the rest of its life, torch's `cuda` is the simulation."""

import atexit
import os
from typing import Any

import torch

from ligerprof.gpus import GpuSpec
from ligerprof.simulated_gpu import cuda_api
from ligerprof.simulated_gpu.backend import Backend
from ligerprof.simulated_gpu.device import Device
from ligerprof.simulated_gpu.operators import Operators
from ligerprof.simulated_gpu.patches import patch_process
from ligerprof.simulated_gpu.ranks.group import install_ranks
from ligerprof.simulated_gpu.saving import Checkpoints
from ligerprof.simulated_gpu.values import Values
from ligerprof.torch_memory.allocator.caching import AllocatorFullError
from ligerprof.torch_memory.allocator.settings import parse_allocator_settings
from ligerprof.units import GIB, MIB

_ALLOC_CONFS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class Machine:
    """A process's simulated GPU.

    Args:
        gpu: which one.
        limit_bytes: limit on reserved memory; None: what torch gets of the GPU's.
        eager: whether functions of torch.compile run without it, instead of being refused.

    Attributes:
        device: its memory.
        values: what is known of the values on it.
        operators: its kernels.
        checkpoints: what the program saved.
    """

    def __init__(self, gpu: GpuSpec, *, limit_bytes: int | None = None, eager: bool = False) -> None:
        self.eager = eager
        text = next((os.environ[name] for name in _ALLOC_CONFS if os.environ.get(name)), "")
        capacity = gpu.usable_bytes if limit_bytes is None else min(limit_bytes, gpu.usable_bytes)
        self.device = Device(gpu, capacity_bytes=capacity, settings=parse_allocator_settings(text))
        self.values = Values(self.device.size_of)
        self.operators = Operators(self.device, self.values)
        self.checkpoints = Checkpoints()
        self._backend = Backend()

    def install(self) -> None:
        """Replace torch's CUDA; it cannot be undone."""
        self._backend.install(self._allocate, self._release, self.device.synchronize)
        cuda_api.install(self.device, self._backend)
        patch_process(self)
        self.operators.register()
        self.checkpoints.install()
        install_ranks(self)
        atexit.register(self._backend.detach)

    def resize(self, storage: torch.UntypedStorage, size_bytes: int) -> None:
        """Give a storage memory of another size, as UntypedStorage.resize_ does on a GPU."""
        self._backend.resize_storage(storage, size_bytes)

    def summary(self) -> dict[str, Any]:
        """What recording.json says about the simulation; see docs/simulated-gpu.md."""
        made_up = sorted(self.values.made_up.items(), key=lambda item: (not item[0].is_shape, -item[1]))
        return {
            "gpu": self.device.gpu.name,
            "measured_gpu": self.device.gpu.measured,
            "attention": sorted(self.operators.attention_used),
            "made_up": [
                {"what": what, "place": where, "is_shape": is_shape, "times": times}
                for (what, where, is_shape), times in made_up
            ],
            "not_written": self.checkpoints.paths,
            "pinned_bytes": self._backend.highest_pinned_bytes(),
        }

    def _allocate(self, size_bytes: int, stream: int) -> int:
        try:
            return self.device.take(size_bytes, stream)
        except AllocatorFullError as full:
            self._backend.ran_out(self._message(full))
            return 0

    def _release(self, address: int) -> None:
        self.values.forget(address)
        self.device.give_back(address)

    def _message(self, full: AllocatorFullError) -> str:
        """As CUDACachingAllocator's, so that programs that read it go on as on a GPU."""
        allocator = self.device.allocator
        free = self.device.capacity_bytes - allocator.reserved_bytes
        return (
            f"CUDA out of memory. Tried to allocate {_torch_size(full.requested_bytes)}. GPU 0 has a total capacity of"
            f" {_torch_size(self.device.gpu.memory_bytes)} of which {_torch_size(max(free, 0))} is free. Of the"
            f" allocated memory {_torch_size(allocator.allocated_bytes)} is allocated by PyTorch, and"
            f" {_torch_size(allocator.reserved_bytes - allocator.allocated_bytes)} is reserved by PyTorch but"
            " unallocated. (This GPU is simulated by ligerprof.)"
        )


def _torch_size(size_bytes: int) -> str:
    """As CUDACachingAllocator's format_size, which programs read."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1024, "KiB")):
        if size_bytes > unit:
            return f"{size_bytes / unit:.2f} {name}"
    return f"{size_bytes} bytes"


def install(gpu: GpuSpec, *, limit_bytes: int | None = None, eager: bool = False) -> Machine:
    """Make and install a machine, once per process."""
    if not _INSTALLED:
        _INSTALLED.append(Machine(gpu, limit_bytes=limit_bytes, eager=eager))
        _INSTALLED[0].install()
    return _INSTALLED[0]


def installed() -> Machine | None:
    """The machine of this process, None if it has none."""
    return _INSTALLED[0] if _INSTALLED else None


_INSTALLED: list[Machine] = []
