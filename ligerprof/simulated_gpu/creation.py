"""torch's functions that make tensors; packages replace those in the module torch, and not what CUDA's kernels call."""

from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch import Tensor


class _Functions(Protocol):
    arange: Callable[..., Tensor]
    empty: Callable[..., Tensor]
    ones: Callable[..., Tensor]
    tensor: Callable[..., Tensor]
    zeros: Callable[..., Tensor]


functions = cast("_Functions", torch._C._VariableFunctions)
