"""Join the process group that a rank's environment variables describe."""

import torch

from ligerprof.recipe.categories import Offload
from ligerprof.recipe.training import TrainingRecipe


def join_process_group(recipe: TrainingRecipe, device: torch.device) -> None:
    """Initialize torch.distributed unless the process did: NCCL for a GPU, gloo for the CPU.

    NCCL connects the ranks at once, so that its memory is taken before the model's.
    """
    from torch import distributed

    if distributed.is_initialized():
        return
    if device.type == "cpu":
        distributed.init_process_group("gloo")
        return
    # the norm of offloaded gradients is summed in main memory
    backend = "nccl" if recipe.offload is Offload.NONE else "cpu:gloo,cuda:nccl"
    distributed.init_process_group(backend, device_id=device)
