"""LayerNorm, softmax and dropout: results and temporaries that CUDA types, orders or needs otherwise than a CPU."""

from typing import Any

import torch

from ligerprof.runs.simulated.internals.call import Call, Internal, dtype_name
from ligerprof.torch_memory import softmax
from ligerprof.torch_memory.layer_norm import backward_scratch

aten = torch.ops.aten


def _native_layer_norm(call: Call) -> Any:
    """Keeps statistics in fp32 (torch_memory/layer_norm.py); a CPU keeps them in the input's type."""
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
    gamma = call.args[5]
    result = call.run()
    if gamma is not None and gamma.numel() > 0:
        columns, rows = gamma.numel(), call.args[1].numel() // gamma.numel()
        call.device.run_scratch(backward_scratch(rows, columns, gamma.element_size(), call.device.gpu))
    return result


NORM_INTERNALS: dict[Any, Internal] = {
    aten.native_layer_norm.default: _native_layer_norm,
    aten.native_layer_norm_backward.default: _native_layer_norm_backward,
    aten.native_dropout.default: _native_dropout,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._safe_softmax.default: _safe_softmax,
}
