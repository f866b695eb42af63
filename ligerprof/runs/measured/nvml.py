"""Read a GPU's memory, clock and power from NVML, the driver's library behind nvidia-smi; needs no CUDA context."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
