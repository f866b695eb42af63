"""What torch's Python code asks its bindings of CUDA for: the functions torch._C._cuda_*, answered by the simulation.

torch.cuda itself stays as it is, so that all of it works as on a GPU.
"""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from ligerprof.errors import UnsupportedError
from ligerprof.gpus import GpuSpec
from ligerprof.simulated_gpu.backend import Backend
from ligerprof.simulated_gpu.device import Device
from ligerprof.simulated_gpu.values import place

# the CUDA version that a CPU build of torch pretends to have
_CUDA_VERSION = "13.0"
# 2.28.9, as torch writes it
_NCCL_VERSION = 2 << 32 | 28 << 16 | 9
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_POOLS = ("all", "small_pool", "large_pool")


def install(device: Device, backend: Backend) -> None:
    """Give torch._C the functions, and let torch.cuda use them."""
    # where this machine's own GPUs are hidden, programs find none of theirs
    if not os.environ.get(_VISIBLE, "0"):
        del os.environ[_VISIBLE]
    # CUDA itself finds none: a kernel that nothing here replaces would run on addresses that are not the GPU's
    os.putenv(_VISIBLE, "")
    bindings: Any = torch._C
    table = {**_device_functions(device, backend), **_memory_functions(device), **_stream_functions(device, backend)}
    for name, function in table.items():
        setattr(bindings, name, function)
    cuda: Any = torch.cuda
    # torch.cuda took these from torch._C when it was imported
    for name in ("_exchange_device", "_maybe_exchange_device"):
        setattr(cuda, name, table[_BOUND[name]])
    cuda._is_in_bad_fork = lambda: False
    cuda._device_count_nvml = lambda: -1
    cuda._get_device_properties = table["_get_device_properties"]
    cuda._cudart = _runtime(device)
    cuda._cached_device_count = None
    # checks of the build for the GPU's architecture
    cuda._queued_calls[:] = [
        call for call in cuda._queued_calls if call[0] not in (cuda._check_capability, cuda._check_cubins)
    ]
    if torch.version.cuda is None:
        torch.version.cuda = _CUDA_VERSION
    torch.backends.cuda.is_built = lambda: True
    # marks for NVIDIA's profilers
    cuda.nvtx._nvtx = SimpleNamespace(**dict.fromkeys(_MARKS, _nothing))
    _replace_streams(backend)
    _refuse_graphs()


_BOUND = {"_exchange_device": "_cuda_exchangeDevice", "_maybe_exchange_device": "_cuda_maybeExchangeDevice"}
_MARKS = ("rangePushA", "rangePop", "rangeStartA", "rangeEnd", "markA", "deviceRangeStart", "deviceRangeEnd")


def _device_functions(device: Device, backend: Backend) -> dict[str, Callable[..., Any]]:
    def properties(_index: int = 0) -> SimpleNamespace:
        return _properties(device.gpu)

    def set_device(index: int) -> None:
        # as the binding does; FakeTensorMode takes cuda:0 before, and remembers it for all modes
        cuda: Any = torch.cuda
        cuda._lazy_init()
        backend.require_own(index)

    def initialize() -> None:
        cuda: Any = torch.cuda
        cuda.default_generators = (torch.Generator(device="cuda"),) * backend.count()

    return {
        "_cuda_init": initialize,
        "_cuda_getDeviceCount": lambda: backend.count(),  # noqa: PLW0108 - hashable
        "_cuda_getDevice": lambda: backend.index(),  # noqa: PLW0108 - hashable
        "_cuda_setDevice": set_device,
        "_cuda_hasPrimaryContext": lambda _index: bool(torch.cuda.is_initialized()),  # type: ignore[no-untyped-call]
        "_cuda_exchangeDevice": lambda _index: backend.index(),
        "_cuda_maybeExchangeDevice": lambda _index: backend.index(),
        "_cuda_canDeviceAccessPeer": lambda *_: False,
        "_cuda_getArchFlags": lambda: "",
        "_cuda_getCompiledVersion": lambda: 13000,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_get_sync_debug_mode": lambda: 0,
        "_cuda_getCurrentBlasHandle": lambda: 0,
        "_cuda_clearCublasWorkspaces": device.clear_workspaces,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        # nn.DataParallel
        "_scatter": _scatter,
        **dict.fromkeys(("_broadcast", "_broadcast_coalesced", "_gather"), _refusal("several GPUs in one process")),
        "_get_device_properties": properties,
        **dict.fromkeys(("_cuda_ipc_collect", "_cuda_sleep", "_cuda_set_sync_debug_mode"), _nothing),
        **dict.fromkeys(("_cuda_lock_mutex", "_cuda_unlock_mutex"), _nothing),
    }


def _scatter(
    tensor: torch.Tensor, devices: Sequence[int], _sizes: object, _dim: int, streams: Sequence[Any] | None
) -> tuple[torch.Tensor, ...]:
    """torch/csrc/cuda/comm.cpp's scatter, to one GPU: a copy of what lies in main memory, on a stream of its own."""
    if len(devices) > 1:
        _refusal("several GPUs in one process")()
    with torch.cuda.stream(streams[0] if streams else None):
        return (tensor.to(f"cuda:{devices[0]}", non_blocking=True),)


def _properties(gpu: GpuSpec) -> SimpleNamespace:
    return SimpleNamespace(
        name=gpu.title,
        major=gpu.compute_capability[0],
        minor=gpu.compute_capability[1],
        total_memory=gpu.memory_bytes,
        multi_processor_count=gpu.sm_count,
        max_threads_per_multi_processor=gpu.max_threads_per_sm,
        warp_size=32,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448 if gpu.compute_capability >= (9, 0) else 101376,
        shared_memory_per_multiprocessor=233472,
        L2_cache_size=gpu.l2_bytes,
        is_integrated=0,
        is_multi_gpu_board=0,
        gcnArchName="",
        uuid="00000000-0000-0000-0000-000000000000",
        pci_bus_id=0,
        pci_device_id=0,
        pci_domain_id=0,
        clock_rate=0,
        memory_clock_rate=0,
        memory_bus_width=0,
    )


def _memory_functions(device: Device) -> dict[str, Callable[..., Any]]:
    fraction = [1.0]

    def set_fraction(value: float, _index: int = 0) -> None:
        # CUDACachingAllocator's setMemoryFraction: a share of the GPU's memory
        fraction[0] = float(value)
        limit = int(value * device.gpu.memory_bytes) if value < 1.0 else None
        device.allocator.set_limit(limit)

    def record_history(enabled: str | None = "all", *arguments: Any) -> None:
        context, _, most, clear = (*arguments, *("all", "all", sys.maxsize, False)[len(arguments) :])[:4]
        if enabled is None:
            device.stop_history()
            return
        if clear:
            device.clear_history()
        device.start_history(most_entries=most, stacks=context is not None)

    def reset_peaks(_index: int = 0) -> None:
        device.allocator.reset_peaks()

    def empty(*_: Any) -> None:
        device.synchronize(-1)
        device.allocator.empty_cache(device.stamped)

    stats = lambda _index=0: _statistics(device)  # noqa: E731 - the same function under two names
    return {
        "_cuda_emptyCache": empty,
        "_cuda_memoryStats": stats,
        "_cuda_resetPeakMemoryStats": reset_peaks,
        "_cuda_hostMemoryStats": dict,
        "_cuda_setMemoryFraction": set_fraction,
        "_cuda_getMemoryFraction": lambda _index=0: fraction[0],
        "_cuda_memorySnapshot": lambda _pool=None: device.snapshot(),
        "_cuda_record_memory_history": record_history,
        "_cuda_record_memory_history_legacy": lambda enabled, *_: record_history("all" if enabled else None),
        "_cuda_setMemoryMetadata": device.stamp,
        "_cuda_getMemoryMetadata": lambda: device.stamped.stamp,
        "_cuda_attach_out_of_memory_observer": device.observers.append,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
        "_cuda_cudaCachingAllocator_raw_alloc": device.take,
        "_cuda_cudaCachingAllocator_raw_delete": device.give_back,
        "_cuda_changeCurrentAllocator": _refusal("another allocator of CUDA memory"),
        "_accelerator_isAllocatorInitialized": lambda: True,
        "_accelerator_emptyCache": empty,
        "_accelerator_getDeviceStats": stats,
        "_accelerator_resetPeakStats": reset_peaks,
        "_accelerator_getMemoryInfo": lambda _index=0: device.memory_info(),
        **dict.fromkeys(("_cuda_resetAccumulatedMemoryStats", "_cuda_resetPeakHostMemoryStats"), _nothing),
        **dict.fromkeys(("_cuda_resetAccumulatedHostMemoryStats", "_accelerator_resetAccumulatedStats"), _nothing),
        "_cuda_cudaCachingAllocator_enable": _nothing,
    }


def _statistics(device: Device) -> dict[str, Any]:
    """torch.cuda.memory_stats as nested dict; the pools of small and of large blocks are not told apart."""
    allocator = device.allocator

    def counters(current: int, peak: int, allocated: int = 0, freed: int = 0) -> dict[str, dict[str, int]]:
        values = {"current": current, "peak": peak, "allocated": allocated, "freed": freed}
        return {pool: dict(values) if pool == "all" else dict.fromkeys(values, 0) for pool in _POOLS}

    blocks = counters(device.allocations - device.frees, 0, device.allocations, device.frees)
    allocated = counters(allocator.allocated_bytes, allocator.peak_allocated_bytes)
    return {
        "allocation": blocks,
        "segment": counters(device.segments - device.segment_frees, 0, device.segments, device.segment_frees),
        "active": blocks,
        "inactive_split": counters(0, 0),
        "allocated_bytes": allocated,
        "reserved_bytes": counters(allocator.reserved_bytes, allocator.peak_reserved_bytes),
        "active_bytes": allocated,
        "inactive_split_bytes": counters(0, 0),
        "requested_bytes": counters(allocator.requested_bytes, 0),
        "oversize_allocations": {"current": 0, "peak": 0, "allocated": 0, "freed": 0},
        "oversize_segments": {"current": 0, "peak": 0, "allocated": 0, "freed": 0},
        "num_alloc_retries": allocator.retries,
        "num_ooms": device.failures,
        "num_sync_all_streams": 0,
        "num_device_alloc": device.segments,
        "num_device_free": device.segment_frees,
        "max_split_size": -1,
    }


def _runtime(device: Device) -> Any:
    """The part of torch._C._cudart that torch and frameworks use."""

    class Status(int):
        success = 0

    return SimpleNamespace(
        cudaError=Status,
        cudaGetErrorString=lambda code: f"error {code}",
        cudaMemGetInfo=lambda _index=0: device.memory_info(),
        cudaProfilerStart=lambda: 0,
        cudaProfilerStop=lambda: 0,
        cudaHostRegister=lambda *_: 0,
        cudaHostUnregister=lambda *_: 0,
        cudaStreamCreate=lambda *_: 0,
        cudaStreamDestroy=lambda *_: 0,
    )


def _stream_functions(device: Device, backend: Backend) -> dict[str, Callable[..., Any]]:
    def stream(number: int) -> tuple[int, int, int]:
        return number, backend.index(), 1

    return {
        "_nccl_version": lambda: _NCCL_VERSION,
        "_nccl_version_suffix": lambda: b"",
        "_cuda_synchronize": lambda: device.synchronize(-1),
        "_cuda_getCurrentStream": lambda _index=0: stream(backend.stream()),
        "_cuda_getDefaultStream": lambda _index=0: stream(0),
        "_cuda_getCurrentRawStream": lambda _index=0: backend.stream(),
        "_cuda_setStream": lambda stream_id=0, device_index=0, device_type=1: backend.set_stream(stream_id),  # noqa: ARG005
        "_cuda_getStreamFromExternal": lambda _pointer, _index=0: stream(0),
    }


def _replace_streams(backend: Backend) -> None:
    """Run torch.cuda.streams again, over streams of torch that the backend knows."""
    bindings: Any = torch._C

    class StreamBase(torch.Stream):
        def __new__(cls, priority: int = 0, **named: Any) -> Any:  # noqa: ARG004 - torch.cuda.Stream's arguments
            number = named.get("stream_id")
            if number is None and "stream_ptr" not in named:
                number = backend.new_stream()
            return super().__new__(cls, stream_id=number or 0, device_index=backend.index(), device_type=1)

        def __init__(self, *_arguments: Any, **_named: Any) -> None:
            """Nothing is left to do."""

        @property
        def cuda_stream(self) -> int:
            return int(self.stream_id)

        @property
        def priority(self) -> int:
            return 0

    class EventBase(torch.Event):
        def __new__(cls, *, blocking: bool = False, interprocess: bool = False, **_named: Any) -> Any:
            return super().__new__(cls, "cuda", enable_timing=True, blocking=blocking, interprocess=interprocess)

        def __init__(self, *_arguments: Any, **_named: Any) -> None:
            """Nothing is left to do."""

        def elapsed_time(self, _end_event: Any) -> float:
            """Milliseconds, made up."""
            return 1.0

    bindings._CudaStreamBase, bindings._CudaEventBase = StreamBase, EventBase
    before: Any = torch.cuda.streams
    old: list[Any] = [getattr(before, name) for name in ("Stream", "Event", "ExternalStream")]
    after: Any = importlib.reload(before)
    for kind in old:
        replace_everywhere(kind, getattr(after, kind.__name__))


def replace_everywhere(old: Any, new: Any) -> None:
    """Let modules that imported a function or class by its name have another one."""
    name = old.__name__
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, new)


def _refuse_graphs() -> None:
    cuda: Any = torch.cuda
    cuda.graphs.is_current_stream_capturing = cuda.is_current_stream_capturing = lambda: False
    for name in ("CUDAGraph", "graph"):
        refused = type(name, (), {"__new__": _refusal("CUDA graphs (--eager runs compiled functions without)")})
        setattr(cuda, name, refused)
        setattr(cuda.graphs, name, refused)


def _refusal(what: str) -> Callable[..., NoReturn]:
    def refuse(*_arguments: Any, **_named: Any) -> NoReturn:
        raise UnsupportedError(f"{place()}: the simulated GPU does not cover {what}. Run without it, or on a GPU.")

    return refuse


def _nothing(*_arguments: Any, **_named: Any) -> None:
    """What has no effect on memory."""
