"""LayerNorm, softmax and dropout: results and temporaries that CUDA types, orders or needs otherwise than a CPU."""

from typing import Any

import torch

from ligerprof.runs.simulated.internals.call import Call, Internal, dtype_name
from ligerprof.runs.simulated.internals.reductions import SUM_VECTOR_16_BIT, reduce_temporaries
from ligerprof.torch_memory import softmax

aten = torch.ops.aten

# LaunchGammaBetaBackwardCUDAKernel: block_dim_x, rows_per_block_y, and the grid that it divides among columns
_COLUMNS_A_BLOCK = 32
_ROWS_A_BLOCK = 32
_MANY_ROWS = 64 * 1024
_LARGEST_GRID = 64 * 1024 // 2


def _native_layer_norm(call: Call) -> Any:
    """Keeps mean and reciprocal deviation in fp32 (aten/src/ATen/native/cuda/layer_norm_kernel.cu, layer_norm_cuda)."""
    output, mean, deviation = call.run_untracked()
    if mean.element_size() == 2:
        mean = mean.new_empty(mean.shape, dtype=torch.float32)
        deviation = deviation.new_empty(deviation.shape, dtype=torch.float32)
    call.track((output, mean, deviation))
    return output, mean, deviation


def _native_dropout(call: Call) -> Any:
    """Allocates the mask before the result (aten/src/ATen/native/cuda/Dropout.cu, dropout_cuda)."""
    output, mask = call.run_untracked()
    call.track((mask, output))
    return output, mask


def _softmax_backward(call: Call) -> Any:
    gradient, output = call.args[:2]
    result = call.run()
    dtypes = (dtype_name(gradient.dtype), dtype_name(output.dtype))
    call.device.run_scratch(softmax.backward_scratch(output.numel(), *dtypes))
    return result


def _safe_softmax(call: Call) -> Any:
    source, dim = call.args[:2]
    result = call.run()
    columns = max(source.shape[dim], 1)
    call.device.run_scratch(softmax.safe_scratch(source.numel() // columns, columns, result.element_size()))
    return result


def _native_layer_norm_backward(call: Call) -> Any:
    """Sums gradients of gamma and beta over blocks of rows where rows are many and short.

    aten/src/ATen/native/cuda/layer_norm_kernel.cu, LaunchGammaBetaBackwardCUDAKernel.
    """
    gamma = call.args[5]
    result = call.run()
    if gamma is None or gamma.numel() == 0:
        return result
    columns = gamma.numel()
    rows = call.args[1].numel() // columns
    blocks = -(-columns // _COLUMNS_A_BLOCK)
    if rows > _MANY_ROWS and columns // _COLUMNS_A_BLOCK < call.device.gpu.sm_count // 2:
        partial = gamma.new_empty((min(-(-rows // _ROWS_A_BLOCK), _LARGEST_GRID // blocks), columns))
        partial_bytes = partial.numel() * partial.element_size()
        with call.device.held(partial_bytes, partial_bytes):
            for _ in ("gamma", "beta"):
                with call.device.held(columns * gamma.element_size()):
                    reduce_temporaries(call, partial, (0,), vector=SUM_VECTOR_16_BIT)
    return result


NORM_INTERNALS: dict[Any, Internal] = {
    aten.native_layer_norm.default: _native_layer_norm,
    aten.native_layer_norm_backward.default: _native_layer_norm_backward,
    aten.native_dropout.default: _native_dropout,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._safe_softmax.default: _safe_softmax,
}
