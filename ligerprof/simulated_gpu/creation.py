"""torch's functions that make tensors; packages replace those in the module torch, and not what CUDA's kernels call."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    functions = torch
else:
    functions = torch._C._VariableFunctions
