"""The memory of a recipe's GPU that torch's allocator can reserve."""

from dataclasses import dataclass

from ligerprof.recipe.training_options import TrainingOptions
from ligerprof.torch_memory.nccl import nccl_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class UsableMemory:
    """What the GPU leaves for torch's allocator; `source` says what is subtracted."""

    size_bytes: int
    source: str


def usable_memory(options: TrainingOptions) -> UsableMemory:
    """The GPU's memory without what is outside torch's allocator."""
    gpu = options.gpu_spec
    return UsableMemory(
        size_bytes=max(0, gpu.memory_bytes - outside_bytes(options)),
        source=f"{gpu.title} less the CUDA context{' and NCCL' if options.gpus > 1 else ''}",
    )


def outside_bytes(options: TrainingOptions) -> int:
    """CUDA's context, the code of kernels and, on several GPUs, NCCL's buffers."""
    gpu = options.gpu_spec
    # HSDP has a communicator of the replicas and one of the shards; that of a single rank takes nothing
    further = sum(size > 1 for size in (options.replicate, options.shards)) if options.replicate > 1 else 0
    return gpu.memory_bytes - gpu.usable_bytes + nccl_bytes(options.gpus, further_communicators=further)
