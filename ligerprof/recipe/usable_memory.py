"""The memory of a recipe's GPU that torch's allocator can reserve."""

from dataclasses import dataclass

from ligerprof.errors import RecipeError
from ligerprof.recipe.training_options import TrainingOptions
from ligerprof.torch_memory.distributed import nccl_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """The most that torch's allocator may reserve; `source` says where the limit comes from."""

    size_bytes: int
    source: str


def find_limit(options: TrainingOptions) -> Limit:
    """The recipe's memory limit, or what its GPU leaves for torch's allocator.

    Raises:
        RecipeError: the limit is above the GPU's memory.
    """
    gpu, given_bytes = options.gpu_spec, options.memory_limit_bytes
    if given_bytes is not None and given_bytes > gpu.memory_bytes:
        raise RecipeError(
            f"--memory-limit {given_bytes} bytes is more than {gpu.title} has. Lower it, or choose --gpu."
        )
    return lowest_limit(options)


def lowest_limit(options: TrainingOptions) -> Limit:
    """The same for a limit of any size."""
    usable, given_bytes = usable_memory(options), options.memory_limit_bytes
    if given_bytes is not None and given_bytes <= usable.size_bytes:
        return Limit(size_bytes=given_bytes, source="--memory-limit")
    return usable


def usable_memory(options: TrainingOptions) -> Limit:
    """The GPU's memory without what is outside torch's allocator."""
    gpu = options.gpu_spec
    return Limit(
        size_bytes=max(0, gpu.memory_bytes - outside_bytes(options)),
        source=f"{gpu.title} less the CUDA context{' and NCCL' if options.gpus > 1 else ''}",
    )


def outside_bytes(options: TrainingOptions) -> int:
    """CUDA's context, the code of kernels and, on several GPUs, NCCL's buffers."""
    gpu = options.gpu_spec
    # HSDP has a communicator of the replicas and one of the shards; that of a single rank takes nothing
    further = sum(size > 1 for size in (options.replicate, options.shards)) if options.replicate > 1 else 0
    return gpu.memory_bytes - gpu.usable_bytes + nccl_bytes(options.gpus, further_communicators=further)
