"""The ledger of GPU memory in use outside torch's allocator, at moments of a step."""

import os
from typing import Any

import torch

from ligerprof.runs.measured.nvml import NvmlDevice
from ligerprof.runs.outcome import OutsideMemory, OutsideMoment


class OutsideLedger:
    """Reads counters of the driver next to those of torch's allocator; create it before the CUDA context."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # the properties need no context
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        self._nvml = None if uuid is None else NvmlDevice.find(f"GPU-{uuid}")
        before = None if self._nvml is None else self._nvml.memory()
        internals: Any = torch._C
        had_context = internals._cuda_hasPrimaryContext(device.index)
        self._others_bytes = None if before is None or had_context else before.used_bytes
        self._moments: list[OutsideMoment] = []

    def note(self, moment: str) -> None:
        """Read the counters; the first call creates the CUDA context."""
        torch.cuda.synchronize(self._device)
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        reserved_bytes = torch.cuda.memory_reserved(self._device)
        self._moments.append(
            OutsideMoment(
                moment=moment,
                outside_bytes=total_bytes - free_bytes - reserved_bytes,
                reserved_bytes=reserved_bytes,
                process_bytes=None if self._nvml is None else self._nvml.process_bytes().get(os.getpid()),
            )
        )

    def result(self) -> OutsideMemory:
        """All moments so far."""
        memory = None if self._nvml is None else self._nvml.memory()
        return OutsideMemory(
            moments=tuple(self._moments),
            other_processes_bytes=self._others_bytes,
            driver_bytes=None if memory is None else memory.reserved_bytes,
        )
