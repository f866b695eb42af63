import ctypes
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ligerprof.runs.measured.step import OutsideLedger
from ligerprof.runs.outcome import OutsideMemory, OutsideMoment
from ligerprof.runs.recording.device import NvmlDevice, NvmlMemory
from ligerprof.serialization import to_json
from ligerprof.units import MIB

UUID = "GPU-1234"


class Driver:
    """What libnvidia-ml exports, with one GPU and the processes on it."""

    def __init__(self, processes: dict[int, int]) -> None:
        self.processes, self.used_bytes = processes, 700 * MIB

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, _handle: Any) -> int:
        return 0 if uuid == UUID.encode() else 6

    def nvmlDeviceGetMemoryInfo_v2(self, _handle: Any, found: Any) -> int:
        memory = found._obj
        # nvmlMemory_v2 of nvml.h
        if memory.version != 0x2000028:
            return 25
        memory.total, memory.reserved, memory.used = 80 * 1024 * MIB, 600 * MIB, self.used_bytes
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, _handle: Any, count: Any, found: Any) -> int:
        if found is None:
            count._obj.value = len(self.processes)
            return 7 if self.processes else 0
        for slot, (pid, used) in zip(found, self.processes.items(), strict=False):
            slot.pid, slot.used = pid, used
        count._obj.value = len(self.processes)
        return 0

    def nvmlDeviceGetClockInfo(self, _handle: Any, kind: int, found: Any) -> int:
        found._obj.value = {0: 111, 1: 1785, 2: 333}[kind]
        return 0

    def nvmlDeviceGetPowerUsage(self, _handle: Any, found: Any) -> int:
        found._obj.value = 699_500
        return 0

    def nvmlDeviceGetTemperature(self, _handle: Any, _sensor: int, _found: Any) -> int:
        # NVML_ERROR_NOT_SUPPORTED
        return 3


def find(driver: object, uuid: str = UUID) -> NvmlDevice | None:
    return NvmlDevice.find(uuid, load=lambda _name: driver)


def no_library(_name: str) -> Any:
    raise OSError("libnvidia-ml.so.1: cannot open shared object file")


def test_memory_and_processes_are_read() -> None:
    device = find(Driver({10: 5 * MIB, 11: 7 * MIB}))
    assert device is not None
    assert device.memory() == NvmlMemory(total_bytes=80 * 1024 * MIB, reserved_bytes=600 * MIB, used_bytes=700 * MIB)
    assert device.process_bytes() == {10: 5 * MIB, 11: 7 * MIB}


def test_clock_and_power_are_read_and_what_is_not_supported_is_left_out() -> None:
    device = find(Driver({}))
    assert device is not None
    assert device.conditions() == {"sm_clock_mhz": 1785, "power_watts": 699.5}


def test_what_the_driver_does_not_say_is_not_known() -> None:
    hidden = find(Driver({10: 2**64 - 1}))
    assert hidden is not None
    assert hidden.process_bytes() == {}
    empty = find(Driver({}))
    assert empty is not None
    assert empty.process_bytes() == {}
    # a driver from before these functions
    old = SimpleNamespace(nvmlInit_v2=lambda: 0, nvmlDeviceGetHandleByUUID=lambda _uuid, _handle: 0)
    device = find(old)
    assert device is not None
    assert (device.memory(), device.process_bytes(), device.conditions()) == (None, {}, {})


def test_without_nvml_or_the_gpu_there_is_no_device() -> None:
    assert NvmlDevice.find(UUID, load=no_library) is None
    assert find(Driver({}), "GPU-none") is None
    assert find(SimpleNamespace(nvmlInit_v2=lambda: 999)) is None
    assert ctypes.sizeof(ctypes.c_void_p) == 8


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A GPU of 80 GiB; the process takes 600 MiB of it at its first synchronization."""
    given = Driver({os.getpid(): 610 * MIB})
    state = {"free": 79 * 1024 * MIB, "reserved": 0}

    def reserve(size_bytes: int, outside_bytes: int = 0) -> None:
        state["reserved"] += size_bytes
        state["free"] -= size_bytes + outside_bytes

    given.reserve = reserve  # type: ignore[attr-defined]
    monkeypatch.setattr(NvmlDevice, "find", classmethod(lambda cls, _uuid: cls(given, ctypes.c_void_p())))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(uuid="1234"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (state["free"], 80 * 1024 * MIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: state["reserved"])
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda _index: False, raising=False)
    return given


def test_what_is_outside_is_what_the_allocator_does_not_hold(driver: Any) -> None:
    ledger = OutsideLedger(torch.device("cuda", 0))
    driver.reserve(0, 600 * MIB)
    ledger.note("context")
    driver.reserve(2048 * MIB, 30 * MIB)
    ledger.note("model")
    outside = to_json(ledger.result())
    assert outside["other_processes_bytes"] == 700 * MIB
    assert outside["driver_bytes"] == 600 * MIB
    assert [each["moment"] for each in outside["moments"]] == ["context", "model"]
    assert [each["outside_bytes"] for each in outside["moments"]] == [1624 * MIB, 1654 * MIB]
    assert [each["reserved_bytes"] for each in outside["moments"]] == [0, 2048 * MIB]
    # what is there before, and what each moment adds, is all there is
    added = sum(each["added_bytes"] for each in outside["moments"])
    assert outside["other_processes_bytes"] + added == outside["outside_bytes"] == 1654 * MIB
    assert outside["moments"][0]["process_bytes"] == 610 * MIB


def test_other_processes_are_not_known_once_there_is_a_context(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda _index: True, raising=False)
    assert OutsideLedger(torch.device("cuda", 0)).result().other_processes_bytes is None


def test_a_ledger_without_moments_has_no_figures() -> None:
    empty = OutsideMemory(moments=(), other_processes_bytes=None, driver_bytes=None)
    assert empty.to_json()["outside_bytes"] is None
    one = OutsideMoment(moment="context", outside_bytes=5, reserved_bytes=0, process_bytes=None)
    alone = OutsideMemory(moments=(one,), other_processes_bytes=None, driver_bytes=None)
    assert alone.to_json()["moments"][0]["added_bytes"] == 5
