"""What a GPU is for the purposes of memory: capacity, multiprocessors, library workspaces."""

from dataclasses import dataclass

from ligerprof.errors import RecipeError
from ligerprof.units import GIB, MIB

# torch's parseChosenWorkspaceSize (aten/src/ATen/cuda/CublasHandlePool.cpp):
# ":4096:2:16:8" before Hopper, ":32768:1" in KiB from compute capability 9.0 on
_CUBLAS_BEFORE_HOPPER_BYTES = 4096 * 1024 * 2 + 16 * 1024 * 8
_CUBLAS_HOPPER_BYTES = 32 * MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSpec:
    """One GPU model.

    Attributes:
        memory_bytes: what torch reports as `total_memory`.
        context_bytes: what the CUDA context and loaded kernels take before torch allocates.
        sm_count: streaming multiprocessors; reductions size their workspaces by it.
        compute_capability: (major, minor); attention backends are chosen by it.
        measured: False where no one measured this GPU and the figures come from data sheets.
    """

    name: str
    title: str
    memory_bytes: int
    context_bytes: int
    sm_count: int
    compute_capability: tuple[int, int]
    max_threads_per_sm: int
    measured: bool = False

    @property
    def cublas_workspace_bytes(self) -> int:
        """Bytes torch gives cuBLAS for each handle and stream."""
        return _CUBLAS_HOPPER_BYTES if self.compute_capability >= (9, 0) else _CUBLAS_BEFORE_HOPPER_BYTES

    @property
    def usable_bytes(self) -> int:
        """Bytes left for torch's allocator once the CUDA context stands."""
        return self.memory_bytes - self.context_bytes


def _gpu(name: str, title: str, memory_gib: float, sm_count: int, capability: tuple[int, int]) -> GpuSpec:
    threads = 2048 if capability in ((8, 0), (9, 0)) else 1024 if capability == (7, 5) else 1536
    return GpuSpec(
        name=name,
        title=title,
        memory_bytes=int(memory_gib * GIB),
        context_bytes=512 * MIB,
        sm_count=sm_count,
        compute_capability=capability,
        max_threads_per_sm=threads,
        measured=name == "h200",
    )


GPUS: dict[str, GpuSpec] = {
    gpu.name: gpu
    for gpu in (
        _gpu("h200", "NVIDIA H200", 139.80, 132, (9, 0)),
        _gpu("h100", "NVIDIA H100 80GB", 79.18, 132, (9, 0)),
        _gpu("a100-80g", "NVIDIA A100 80GB", 79.25, 108, (8, 0)),
        _gpu("a100-40g", "NVIDIA A100 40GB", 39.49, 108, (8, 0)),
        _gpu("l40s", "NVIDIA L40S", 44.40, 142, (8, 9)),
        _gpu("rtx4090", "NVIDIA GeForce RTX 4090", 23.52, 128, (8, 9)),
        _gpu("rtx3090", "NVIDIA GeForce RTX 3090", 23.57, 82, (8, 6)),
        _gpu("t4", "NVIDIA T4", 14.56, 40, (7, 5)),
    )
}


def find_gpu(name: str) -> GpuSpec:
    """Look a GPU up by its name in `ligerprof env`.

    Raises:
        RecipeError: no such GPU in the table.
    """
    if name not in GPUS:
        raise RecipeError(f"unknown GPU {name!r}. Known: {', '.join(GPUS)}.")
    return GPUS[name]
