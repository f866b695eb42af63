"""Decompose composite operators on fake CPU tensors as on CUDA.

Composite operators choose their implementation by the device of their inputs. During a simulation, the functions below
are registered for the dispatch key of fake tensors and call what CUDA would call.
"""

from typing import Any, cast

import torch
from torch import Tensor

from ligerprof.runs.simulated.internals.call import dtype_name
from ligerprof.torch_memory.softmax import casts_first

aten = torch.ops.aten

_KEY = "AutogradCPU"


def _softmax(source: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    return _normalize(aten._softmax.default, source, dim, dtype)


def _log_softmax(source: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    return _normalize(aten._log_softmax.default, source, dim, dtype)


def _normalize(operator: Any, source: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
    wanted = source.dtype if dtype is None else dtype
    if casts_first(dtype_name(source.dtype), dtype_name(wanted)):
        source = source.to(wanted)
    return cast(Tensor, operator(source, dim, half_to_float=wanted != source.dtype))


def _dropout(source: Tensor, probability: float, train: bool) -> Tensor:
    """A fused kernel that keeps a mask of bools (aten/src/ATen/native/Dropout.cpp, is_fused_kernel_acceptable)."""
    if not train or probability == 0.0 or source.numel() == 0:
        return source
    if probability == 1.0:
        return source * torch.zeros((), dtype=source.dtype, device=source.device)
    return cast(Tensor, aten.native_dropout.default(source, probability, train)[0])


def _one_hot(source: Tensor, num_classes: int = -1) -> Tensor:
    """Zeros, into which ones are scattered (aten/src/ATen/native/Onehot.cpp)."""
    ones = torch.zeros((*source.shape, num_classes), dtype=torch.int64, device=source.device)
    return ones.scatter_(-1, source.unsqueeze(-1), 1)


def register(library: torch.library.Library, attention: Any) -> None:
    """Register these functions, and `attention` as scaled_dot_product_attention, until the library is destroyed."""
    for name, function in (
        ("softmax.int", _softmax),
        ("log_softmax.int", _log_softmax),
        ("dropout", _dropout),
        ("one_hot", _one_hot),
        ("scaled_dot_product_attention", attention),
    ):
        library.impl(name, function, _KEY)  # type: ignore[no-untyped-call]
