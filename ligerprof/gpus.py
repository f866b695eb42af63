"""The table of GPUs: memory capacity, multiprocessors and library workspaces."""

from dataclasses import dataclass

from ligerprof.errors import RecipeError
from ligerprof.units import MIB
from ligerprof.words import Word

# torch's parseChosenWorkspaceSize (aten/src/ATen/cuda/CublasHandlePool.cpp):
# in KiB, ":4096:2:16:8" before compute capability 9.0, ":32768:1" from 9.0
_CUBLAS_BEFORE_HOPPER_BYTES = 4096 * 1024 * 2 + 16 * 1024 * 8
_CUBLAS_HOPPER_BYTES = 32 * MIB
# the same function on ROCm, for gfx94x
_HIPBLAS_GFX94_BYTES = 128 * MIB

# measured on an H200 with CUDA 13 after torch's first call; used for all GPUs
_CONTEXT_BYTES = 552_402_944


class Vendor(Word):
    """Who makes the GPU; decides between CUDA's and ROCm's libraries."""

    NVIDIA = "nvidia"
    AMD = "amd"


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSpec:
    """One GPU model.

    Attributes:
        title: the device name that torch reports.
        memory_bytes: the `total_memory` that torch reports; the smallest of several reports.
        context_bytes: memory of the CUDA context and loaded kernels before torch allocates.
        sm_count: multiprocessors (AMD: compute units); determines the workspaces of reductions.
        compute_capability: (major, minor); determines the attention backend.
        max_threads_per_sm: maximum resident threads per multiprocessor.
        measured: whether this project measured the figures; the others come from data sheets and public reports.
    """

    name: str
    title: str
    memory_bytes: int
    context_bytes: int
    sm_count: int
    compute_capability: tuple[int, int]
    max_threads_per_sm: int
    vendor: Vendor = Vendor.NVIDIA
    measured: bool = False

    @property
    def cublas_workspace_bytes(self) -> int:
        """Bytes of torch's cuBLAS or hipBLAS workspace, per handle and stream."""
        if self.vendor is Vendor.AMD:
            return _HIPBLAS_GFX94_BYTES
        return _CUBLAS_HOPPER_BYTES if self.compute_capability >= (9, 0) else _CUBLAS_BEFORE_HOPPER_BYTES

    @property
    def usable_bytes(self) -> int:
        """Bytes available to torch's allocator after the CUDA context is created."""
        return self.memory_bytes - self.context_bytes


# CUDA C++ programming guide, "technical specifications per compute capability"; 2048 for the others
_MAX_THREADS_PER_SM = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536}


def _gpu(name: str, title: str, memory_mib: float, sm_count: int, capability: tuple[int, int]) -> GpuSpec:
    return GpuSpec(
        name=name,
        title=title,
        memory_bytes=int(memory_mib * MIB),
        context_bytes=_CONTEXT_BYTES,
        sm_count=sm_count,
        compute_capability=capability,
        max_threads_per_sm=_MAX_THREADS_PER_SM.get(capability, 2048),
        vendor=Vendor.AMD if title.startswith("AMD") else Vendor.NVIDIA,
        measured=name == "h200",
    )


GPUS: dict[str, GpuSpec] = {
    gpu.name: gpu
    for gpu in (
        _gpu("h200", "NVIDIA H200", 143155.9375, 132, (9, 0)),
        _gpu("h100", "NVIDIA H100 80GB HBM3", 81082, 132, (9, 0)),
        _gpu("a100-80g", "NVIDIA A100-SXM4-80GB", 81049, 108, (8, 0)),
        _gpu("a100-40g", "NVIDIA A100-SXM4-40GB", 40339, 108, (8, 0)),
        _gpu("l40s", "NVIDIA L40S", 45466, 142, (8, 9)),
        _gpu("rtx4090", "NVIDIA GeForce RTX 4090", 24084, 128, (8, 9)),
        _gpu("rtx3090", "NVIDIA GeForce RTX 3090", 24136, 82, (8, 6)),
        _gpu("t4", "Tesla T4", 14913, 40, (7, 5)),
        # torch reports gfx942 as (9, 4); sm_count is the number of compute units
        _gpu("mi300x", "AMD Instinct MI300X", 196292, 304, (9, 4)),
    )
}


def find_gpu(name: str) -> GpuSpec:
    """Look up a GPU by its name in `ligerprof env`.

    Raises:
        RecipeError: the table has no GPU of this name.
    """
    if name not in GPUS:
        raise RecipeError(f"unknown GPU {name!r}. Known: {', '.join(GPUS)}.")
    return GPUS[name]
