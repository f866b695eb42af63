"""Buffers of CUDA's foreach reductions."""

from typing import Any

import torch

from ligerprof.runs.simulated.internals.call import Call, Internal

aten = torch.ops.aten

# MultiTensorApply.cuh, kChunkSize
_CHUNK = 65_536


def _foreach_norm(call: Call) -> Any:
    """A partial norm in fp32 for every chunk of the largest tensor and every tensor.

    aten/src/ATen/native/cuda/ForeachReduceOp.cu, foreach_tensor_norm_cuda: `output_per_tensor`.
    """
    tensors = call.args[0]
    chunks = max(-(-tensor.numel() // _CHUNK) for tensor in tensors)
    with call.device.held(4 * len(tensors) * chunks):
        return call.run()


FOREACH_INTERNALS: dict[Any, Internal] = {aten._foreach_norm.Scalar: _foreach_norm}
