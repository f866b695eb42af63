"""The memory of a GPU over time: pools of torch's allocators, contexts, other processes, and what was freed."""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ligerprof.serialization import select

if TYPE_CHECKING:
    from ligerprof.runs.recording.patches import Patches

_LIBRARY = "libnvidia-ml.so.1"
_SUCCESS, _INSUFFICIENT_SIZE = 0, 7
_MOST_PROCESSES = 4096
_SM_CLOCK, _GPU_TEMPERATURE = 1, 0
# NVML_VALUE_NOT_AVAILABLE
_UNKNOWN = 2**64 - 1


class _Memory(ctypes.Structure):
    """nvmlMemory_v2_t."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t of the functions with suffix _v3."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class NvmlMemory:
    """The memory of one GPU.

    Attributes:
        total_bytes: reserved, used and free bytes together.
        reserved_bytes: what the driver and the firmware keep for themselves.
        used_bytes: what the contexts of all processes hold.
    """

    total_bytes: int
    reserved_bytes: int
    used_bytes: int


class NvmlDevice:
    """One GPU; `find` opens it."""

    def __init__(self, library: Any, handle: ctypes.c_void_p) -> None:
        self._library, self._handle = library, handle

    @classmethod
    def find(cls, uuid: str, *, load: Callable[[str], Any] = ctypes.CDLL) -> "NvmlDevice | None":
        """The GPU with this UUID, such as `GPU-5a0b…`; None without NVML or such a GPU."""
        try:
            nvml = load(_LIBRARY)
            handle = ctypes.c_void_p()
            if nvml.nvmlInit_v2() != _SUCCESS:
                return None
            if nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) != _SUCCESS:
                return None
        except (OSError, AttributeError):
            # no driver, or one without these functions
            return None
        return cls(nvml, handle)

    def memory(self) -> NvmlMemory | None:
        """The GPU's memory now; None if the driver does not report it."""
        found = _Memory(version=ctypes.sizeof(_Memory) | 2 << 24)
        try:
            result = self._library.nvmlDeviceGetMemoryInfo_v2(self._handle, ctypes.byref(found))
        except AttributeError:
            return None
        if result != _SUCCESS:
            return None
        return NvmlMemory(total_bytes=found.total, reserved_bytes=found.reserved, used_bytes=found.used)

    def process_bytes(self) -> dict[int, int]:
        """Bytes per process id, as nvidia-smi lists them; {} if the driver does not report them.

        In a container the ids may be those of the host, or the list may be empty.
        """
        count = ctypes.c_uint(0)
        try:
            ask = self._library.nvmlDeviceGetComputeRunningProcesses_v3
        except AttributeError:
            return {}
        result = ask(self._handle, ctypes.byref(count), None)
        if result not in (_SUCCESS, _INSUFFICIENT_SIZE) or not 0 < count.value <= _MOST_PROCESSES:
            return {}
        # processes may start in between
        count.value += 16
        found = (_Process * count.value)()
        if ask(self._handle, ctypes.byref(count), found) != _SUCCESS:
            return {}
        return {each.pid: each.used for each in found[: count.value] if each.used != _UNKNOWN}

    def conditions(self) -> dict[str, int | float]:
        """What the chip runs at now: `sm_clock_mhz`, `power_watts` and `temperature_celsius`.

        A value that the driver does not report is left out. Power is the driver's average, over up to a second.
        """
        found = {
            "sm_clock_mhz": self._number("nvmlDeviceGetClockInfo", _SM_CLOCK),
            "power_watts": self._number("nvmlDeviceGetPowerUsage"),
            "temperature_celsius": self._number("nvmlDeviceGetTemperature", _GPU_TEMPERATURE),
        }
        known: dict[str, int | float] = {name: value for name, value in found.items() if value is not None}
        if "power_watts" in known:
            known["power_watts"] /= 1000
        return known

    def _number(self, function: str, *arguments: int) -> int | None:
        value = ctypes.c_uint()
        try:
            result = getattr(self._library, function)(self._handle, *arguments, ctypes.byref(value))
        except AttributeError:
            return None
        return value.value if result == _SUCCESS else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """One pool of torch's allocator in one process."""

    name: str
    reserved_bytes: int
    allocated_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMoment:
    """A GPU as one process sees it.

    Attributes:
        at_us: Unix time.
        event: what has just happened: `step` (one begins), `sleep` or `wake_up` of an engine, `out_of_memory`, `end`.
        used_bytes: of all processes, by the driver's count (cudaMemGetInfo).
        processes: bytes by process id, as nvidia-smi lists them; empty if the driver does not say.
        freed_bytes: by how much `sleep` or `wake_up` lowered `used_bytes`; negative if it rose.
    """

    at_us: int
    step: int
    event: str
    pools: tuple[Pool, ...]
    total_bytes: int
    used_bytes: int
    processes: Mapping[int, int] = field(default_factory=dict)
    freed_bytes: int | None = None

    @property
    def reserved_bytes(self) -> int:
        """Of all pools."""
        return sum(pool.reserved_bytes for pool in self.pools)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "DeviceMoment":
        """Read what `serialization.to_json` writes; raises TypeError, ValueError or KeyError for anything else."""
        pools = tuple(Pool(**pool) for pool in values["pools"])
        processes = {int(pid): int(size_bytes) for pid, size_bytes in values["processes"].items()}
        return cls(**{**values, "pools": pools, "processes": processes})


def pool_name(pool_id: tuple[int, int]) -> str:
    """The name of a pool: MempoolId_t (c10/core/CachingDeviceAllocator.h) numbers captures first, MemPools second."""
    captured, made = pool_id
    if captured:
        return f"CUDA graphs {captured}"
    # torch.cuda.graph_pool_handle() numbers its pools as MemPools are
    return f"MemPool or graphs' handle {made}" if made else "default pool"


def torch_pools(device: int, *, is_recorded: bool) -> tuple[Pool, ...]:
    """The pools of this process on a device; one for all where only a copy of the whole history tells them apart."""
    import torch

    cuda: Any = torch.cuda
    try:
        segments = cuda.memory_snapshot(include_traces=False)
    except TypeError:
        if is_recorded:
            counters = cuda.memory_stats_as_nested_dict(device)
            sizes = (int(counters[f"{name}_bytes"]["all"]["current"]) for name in ("reserved", "allocated"))
            return (Pool(name="all pools", reserved_bytes=next(sizes), allocated_bytes=next(sizes)),)
        segments = cuda.memory_snapshot()
    sizes_of: dict[tuple[int, int], list[int]] = {}
    for segment in segments:
        if segment["device"] == device:
            found = sizes_of.setdefault(tuple(segment["segment_pool_id"]), [0, 0])
            found[0] += segment["total_size"]
            found[1] += segment["allocated_size"]
    return tuple(
        Pool(name=pool_name(key), reserved_bytes=reserved, allocated_bytes=allocated)
        for key, (reserved, allocated) in sorted(sizes_of.items())
    )


# an engine's sleep unmaps its pools behind torch's back; (module, function, event); none was run with the engine
_ENGINES = (
    ("vllm.v1.worker.gpu_worker", "Worker.sleep", "sleep"),
    ("vllm.v1.worker.gpu_worker", "Worker.wake_up", "wake_up"),
    ("torch_memory_saver.entrypoint", "TorchMemorySaver.pause", "sleep"),
    ("torch_memory_saver.entrypoint", "TorchMemorySaver.resume", "wake_up"),
)


class DeviceWatch:
    """Reads the counters of a process's device: the current one of the first reading, since ranks choose theirs late.

    Attributes:
        uuid: the GPU's name in all processes, whatever they number it; "" before the first reading.
        emptied: calls of empty_cache, and the bytes that they freed.
    """

    def __init__(self) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._device: int | None = None
        self._nvml: NvmlDevice | None = None
        self.uuid = ""
        self.emptied = [0, 0]

    def _chosen(self) -> int:
        """The device."""
        if self._device is None:
            self._device = int(self._cuda.current_device())
            properties = self._cuda.get_device_properties(self._device)
            self.uuid = str(getattr(properties, "uuid", self._device))
            self._nvml = NvmlDevice.find(f"GPU-{self.uuid}")
        return self._device

    @property
    def is_capturing(self) -> bool:
        """Whether a CUDA graph is captured, during which the driver may not be asked."""
        return bool(self._cuda.is_current_stream_capturing())

    def read(self, step: int, event: str, *, is_recorded: bool, freed_bytes: int | None = None) -> DeviceMoment:
        """The device now."""
        from ligerprof.runs.recording.saved import unix_time_us

        device = self._chosen()
        free_bytes, total_bytes = self._cuda.mem_get_info(device)
        return DeviceMoment(
            at_us=unix_time_us(),
            step=step,
            event=event,
            pools=torch_pools(device, is_recorded=is_recorded),
            total_bytes=total_bytes,
            used_bytes=total_bytes - free_bytes,
            processes={} if self._nvml is None else self._nvml.process_bytes(),
            freed_bytes=freed_bytes,
        )

    def observe(self, patches: "Patches", note: Callable[[str, int], None]) -> None:
        """Count what empty_cache frees; call `note` with event and freed bytes of engines that sleep or wake."""

        def counted(original: Any) -> Any:
            def empty_cache() -> None:
                before = self._cuda.memory_reserved() if patches.active else 0
                original()
                if patches.active:
                    self.emptied[0] += 1
                    self.emptied[1] += before - self._cuda.memory_reserved()

            return empty_cache

        def noted(event: str) -> Callable[[Any], Any]:
            def make(original: Any) -> Any:
                def call(*arguments: Any, **named: Any) -> Any:
                    before = self._cuda.mem_get_info()[0]
                    result = original(*arguments, **named)
                    if patches.active:
                        note(event, self._cuda.mem_get_info()[0] - before)
                    return result

                return call

            return make

        for owner in (self._cuda, self._cuda.memory):
            patches.wrap(owner, "empty_cache", counted)
        for module, name, event in _ENGINES:
            patches.wrap_imported(module, name, noted(event))


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceProcess:
    """What one process noted of a GPU.

    Attributes:
        ended: whether it had ended after its last moment.
        emptied: calls of torch.cuda.empty_cache, and the bytes that they freed.
    """

    name: str
    pid: int
    uuid: str
    moments: tuple[DeviceMoment, ...]
    ended: bool
    emptied: tuple[int, int] = (0, 0)

    def at(self, at_us: int) -> DeviceMoment | None:
        """The last moment that was noted by then; None before the first, and after the end."""
        noted = [moment for moment in self.moments if moment.at_us <= at_us]
        is_over = bool(noted) and self.ended and noted[-1] is self.moments[-1] and noted[-1].at_us < at_us
        return None if is_over or not noted else noted[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRow:
    """A part of the memory that is in use.

    Attributes:
        process: the name of a recorded process, or None.
        allocated_bytes: of a pool, what tensors hold.
        size_bytes: negative for what torch counts as reserved and the driver does not, as an engine's that sleeps.
    """

    process: str | None
    part: str
    size_bytes: int
    allocated_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceLedger:
    """A GPU at one moment; the rows add up to `used_bytes`."""

    moment: DeviceMoment
    process: str
    rows: tuple[DeviceRow, ...]

    def to_json(self) -> dict[str, Any]:
        """An entry of `moments` in the JSON."""
        names = ("at_us", "step", "event", "used_bytes", "freed_bytes")
        return {"process": self.process, **select(self.moment, *names), "rows": select(self, "rows")["rows"]}


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceReport:
    """A GPU while a command ran, as its recorded processes noted it; the oldest moment first."""

    total_bytes: int
    ledgers: tuple[DeviceLedger, ...]
    processes: tuple[DeviceProcess, ...]

    @property
    def fullest(self) -> DeviceLedger:
        """The moment with the most bytes in use."""
        return max(self.ledgers, key=lambda each: each.moment.used_bytes)

    def notes(self) -> Iterator[str]:
        """Findings, one sentence each, without a full stop."""
        for process in self.processes:
            calls, freed_bytes = process.emptied
            if calls and not freed_bytes:
                yield f"torch.cuda.empty_cache() freed 0 bytes in {process.name}, in {calls} call{'s' * (calls > 1)}"
            slept = [moment for moment in process.moments if moment.event == "sleep"]
            if slept and all((moment.freed_bytes or 0) <= 0 for moment in slept):
                yield f"the engine in {process.name} freed 0 bytes when it went to sleep"

    def to_json(self) -> dict[str, Any]:
        """An entry of `devices` in the JSON."""
        emptied = {
            process.name: {"calls": process.emptied[0], "freed_bytes": process.emptied[1]} for process in self.processes
        }
        return {
            "total_bytes": self.total_bytes,
            "fullest": self.ledgers.index(self.fullest),
            "moments": [ledger.to_json() for ledger in self.ledgers],
            "empty_cache": emptied,
        }


def device_reports(processes: Iterable[DeviceProcess]) -> tuple[DeviceReport, ...]:
    """What the processes noted, by GPU."""
    by_gpu: dict[str, list[DeviceProcess]] = {}
    for process in processes:
        if process.moments:
            by_gpu.setdefault(process.uuid, []).append(process)
    return tuple(_report(sharing) for sharing in by_gpu.values())


def _report(sharing: Sequence[DeviceProcess]) -> DeviceReport:
    noted = sorted(
        ((moment, process) for process in sharing for moment in process.moments), key=lambda each: each[0].at_us
    )
    ledgers = tuple(_ledger(moment, process, sharing) for moment, process in noted)
    return DeviceReport(total_bytes=noted[0][0].total_bytes, ledgers=ledgers, processes=tuple(sharing))


def _ledger(moment: DeviceMoment, of: DeviceProcess, sharing: Sequence[DeviceProcess]) -> DeviceLedger:
    rows: list[DeviceRow] = []
    unknown = dict(moment.processes)
    are_known = True
    for process in sharing:
        then = moment if process is of else process.at(moment.at_us)
        if then is None:
            continue
        rows += (
            DeviceRow(
                process=process.name,
                part=pool.name,
                size_bytes=pool.reserved_bytes,
                allocated_bytes=pool.allocated_bytes,
            )
            for pool in then.pools
        )
        held_bytes = unknown.pop(process.pid, None)
        are_known = are_known and held_bytes is not None
        if held_bytes is not None:
            part = "outside torch's allocator: context, kernels, libraries"
            rows.append(DeviceRow(process=process.name, part=part, size_bytes=held_bytes - then.reserved_bytes))
    if are_known:
        rows += (DeviceRow(process=None, part=f"process {pid}", size_bytes=size) for pid, size in unknown.items())
    rest = "the driver, in no process" if are_known else "contexts, libraries and other processes, not told apart"
    left_bytes = moment.used_bytes - sum(row.size_bytes for row in rows)
    if left_bytes:
        rows.append(DeviceRow(process=None, part=rest, size_bytes=left_bytes))
    return DeviceLedger(moment=moment, process=of.name, rows=tuple(rows))
