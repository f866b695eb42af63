"""torch's functions that make tensors; packages replace those in the module torch, and not what CUDA's kernels call."""

from typing import Any

import torch

functions: Any = torch._C._VariableFunctions
