"""A simulated GPU that counts the bytes which one call requests."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch._subclasses.fake_tensor import FakeTensorMode

from ligerprof.gpus import GpuSpec, find_gpu
from ligerprof.runs.simulated.device import DeviceLimits, SimulatedDevice
from ligerprof.runs.simulated.patches import simulated_process
from ligerprof.runs.simulated.recorder import StorageRecorder
from ligerprof.torch_memory.allocator.blocks import Block
from ligerprof.torch_memory.allocator.settings import AllocatorSettings

SIMULATED_GPU = find_gpu("h200")


class RequestedBytes(SimulatedDevice):
    """A simulated device that sums requested bytes, without rounding and remainders."""

    def __init__(self, gpu: GpuSpec) -> None:
        limits = DeviceLimits(capacity_bytes=2**40, limit_bytes=None)
        super().__init__(gpu, limits, AllocatorSettings(), record=False)
        self.live_bytes = self.peak_bytes = 0

    def allocate(self, size_bytes: int) -> Block:
        """Allocate a block."""
        self.live_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return super().allocate(size_bytes)

    def release(self, block: Block) -> None:
        """Free a block."""
        self.live_bytes -= block.requested_bytes
        super().release(block)

    def hold_for_good(self, name: str, size_bytes: int) -> None:
        """Libraries' workspaces are counted by step, not by call."""


@contextmanager
def simulated_gpu() -> Iterator[RequestedBytes]:
    """Fake tensors that are created inside are allocated as on `SIMULATED_GPU`."""
    device = RequestedBytes(SIMULATED_GPU)
    recorder = StorageRecorder(device)
    # labels pass a kernel's checks
    checks_pass = recorder.answering(truth=True)
    with simulated_process(SIMULATED_GPU, recorder, set()), FakeTensorMode(), recorder, checks_pass:
        yield device
