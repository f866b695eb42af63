"""What the fused attention kernels of CUDA allocate beyond what their operators return."""

from typing import Any

import torch

from ligerprof.runs.simulated.internals.call import Call, Internal

aten = torch.ops.aten

# cuDNN's own workspace in forward, and on top of the formula in backward: measured on an H200
_CUDNN_WORKSPACE_BYTES = 256
# run_cudnn_SDP_fprop (aten/src/ATen/native/cudnn/MHA.cpp): seed and offset, then the output and the statistics
_CUDNN_FORWARD_ORDER = (6, 7, 0, 1)


def _cudnn_forward(call: Call) -> Any:
    result = call.run_untracked()
    for index in _CUDNN_FORWARD_ORDER:
        call.track(result[index])
    call.device.touch(_CUDNN_WORKSPACE_BYTES)
    return result


def _cudnn_backward(call: Call) -> Any:
    """An fp32 accumulator of the query's gradient and row sums; with grouped heads, ungrouped gradients of K and V."""
    _, query, key, value = call.args[:4]
    batch, heads, queries, width = query.shape
    workspace = 4 * batch * heads * queries * (width + 1) + _CUDNN_WORKSPACE_BYTES
    if key.shape[1] != heads:
        keys = batch * heads * key.shape[2]
        workspace += keys * (width + value.shape[-1]) * query.element_size()
    result = call.run()
    call.device.touch(workspace)
    return result


ATTENTION_INTERNALS: dict[Any, Internal] = {
    aten._scaled_dot_product_cudnn_attention.default: _cudnn_forward,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
}
