"""Views of a kernel's inputs as rows, and whether a kernel may overwrite its inputs."""

import torch
from torch import Tensor

from ligerprof.kernels.device import is_simulated


def as_rows(x: Tensor) -> Tensor:
    """`x` with its leading axes merged into one and its last axis dense; a view if the strides allow it."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def graph_is_retained() -> bool:
    """Whether the running backward pass may run again (`retain_graph=True`), so that saved tensors must stay intact."""
    # torch's own compiled backward passes check this before they free or overwrite anything
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def is_unshared(tensor: Tensor) -> bool:
    """Whether this tensor, and the one that it is a view of, are the only tensors on their memory.

    False for a tensor that checkpointing keeps as the result of a recomputed or selected operation, and for a result
    that its own operation keeps. True for a tensor that is kept as an operation's input, which is the same tensor. Fake
    tensors keep more tensors alive than real ones do: a simulation returns True for a tensor that fills its storage.
    """
    if is_simulated():
        return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    own = 1 if tensor._base is None else 2
    # torch's CUDA graphs use this count; the call itself holds one more reference
    return bool(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == own + 1)
