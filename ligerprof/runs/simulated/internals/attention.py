"""What the fused attention kernels of CUDA allocate beyond what their operators return.

Read in aten/src/ATen/native/transformers/cuda (attention.cu, attention_backward.cu, flash_attn/flash_api.cpp,
mem_eff_attention/kernel_backward.h) and aten/src/ATen/native/cudnn/MHA.cpp; every size was measured on one H200 with
torch 2.11, whose sm80 kernels are those of older GPUs too.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ligerprof.gpus import GpuSpec
from ligerprof.runs.simulated.internals.call import Call, Internal

aten = torch.ops.aten

# axes: B batch, H query heads, G key and value heads, S queries, T keys, D head size

_CUDNN_WORKSPACE_BYTES = 256
# run_cudnn_SDP_fprop: seed and offset, then the output and the statistics
_CUDNN_FORWARD_ORDER = (6, 7, 0, 1)
_FLASH_ROWS = 128
_FLASH_QUERY_TILE = 64
_SPLIT_EFFICIENCY = 0.85
_LARGEST_SPLIT = 128
# kernel_backward.h: GradQTempStorage carries a lock, a counter and padding beside its tile
_TILE_HEADER_BYTES = 16
_STAGED_SPLITS = 200


def _cudnn_forward(call: Call) -> Any:
    result = call.run_untracked()
    for index in _CUDNN_FORWARD_ORDER:
        call.track(result[index])
    call.device.touch(_CUDNN_WORKSPACE_BYTES)
    return result


def _cudnn_backward(call: Call) -> Any:
    """An fp32 accumulator of the query's gradient and row sums; with grouped heads, ungrouped gradients of K and V."""
    query, key, value = call.args[1:4]
    batch, heads, queries, width = query.shape
    workspace = 4 * batch * heads * queries * (width + 1) + _CUDNN_WORKSPACE_BYTES
    if key.shape[1] != heads:
        keys = batch * heads * key.shape[2]
        workspace += keys * (width + value.shape[-1]) * query.element_size()
    result = call.run()
    call.device.touch(workspace)
    return result


def _flash_forward(call: Call) -> Any:
    """mha_fwd: where there are too few blocks for the GPU, keys are split and partial outputs kept in fp32."""
    query, key = call.args[:2]
    dropout = call.argument(3, "dropout_p", 0.0)
    result = call.run_untracked()
    output, statistics, random_state, unused = (result[index] for index in (0, 1, 6, 7))
    call.track((output, statistics))
    splits = _flash_splits(query.shape, key.shape[2], call.device.gpu) if dropout == 0.0 else 1
    batch, heads, queries, width = query.shape
    rows_bytes = 4 * splits * batch * heads * queries if splits > 1 else 0
    partial = [call.device.allocate(size) for size in (rows_bytes, rows_bytes * _round_up(width, 32)) if size]
    call.track((random_state, unused))
    if dropout > 0.0:
        call.device.touch(random_state.numel() * random_state.element_size())
    for block in partial:
        call.device.release(block)
    return result


def _flash_splits(query_shape: Any, keys: int, gpu: GpuSpec) -> int:
    """num_splits_heuristic of flash_api.cpp."""
    batch, heads, queries, width = query_shape
    key_tile = 256 if width <= 64 else 128 if width <= 128 else 64
    blocks = batch * heads * math.ceil(queries / _FLASH_QUERY_TILE)
    places = 2 * gpu.sm_count
    if blocks >= 0.8 * places:
        return 1
    tiles = math.ceil(keys / key_tile)
    efficiency = {}
    for splits in range(1, min(_LARGEST_SPLIT, places, tiles) + 1):
        if splits == 1 or math.ceil(tiles / splits) != math.ceil(tiles / (splits - 1)):
            waves = blocks * splits / places
            efficiency[splits] = waves / math.ceil(waves)
    best = max(efficiency.values())
    return next(splits for splits, share in efficiency.items() if share >= _SPLIT_EFFICIENCY * best)


def _flash_backward(call: Call) -> Any:
    """mha_bwd: row sums and the query's gradient in fp32; with grouped heads, ungrouped gradients of K and V."""
    query, key = call.args[1:3]
    batch, heads, queries, width = query.shape
    rows = batch * heads * _round_up(queries, _FLASH_ROWS)
    columns = _round_up(width, 32 if width <= 128 else 64)
    ungrouped = batch * heads * key.shape[2] * width * query.element_size() if key.shape[1] != heads else 0
    result = call.run()
    call.device.touch(4 * rows, 4 * rows * columns, ungrouped, ungrouped)
    return result


def _efficient_forward(call: Call) -> Any:
    """Seed and offset stay on the host; wide heads in 16 bits are accumulated in fp32 outside of registers."""
    query = call.args[0]
    result = call.run_untracked()
    call.track(result[:2] if call.argument(4, "compute_log_sumexp") else result[0])
    if query.element_size() == 2 and query.shape[-1] > 128:
        call.device.touch(4 * query.numel())
    return result


def _efficient_backward(call: Call) -> Any:
    query, key = call.args[1:3]
    batch, heads, queries, _ = query.shape
    rows_bytes = 4 * batch * heads * queries
    result = call.run()
    if query.element_size() == 4:
        # the kernel does not compute delta: a product, its sum, and the sum with its axes in order
        with call.device.held(4 * query.numel(), rows_bytes):
            delta = call.device.allocate(rows_bytes)
    else:
        delta = call.device.allocate(rows_bytes)
    workspace = call.device.allocate(batch * heads * _efficient_workspace(query, key.shape[2]))
    call.device.release(delta)
    call.device.release(workspace)
    return result


def _efficient_workspace(query: Tensor, keys: int) -> int:
    """Bytes a head: tiles of the query's gradient, staged gradients of K and V (workspace_elements_gq, _gk, _gv)."""
    batch, heads, queries, width = query.shape
    half = query.element_size() == 2
    rows = 128 if half and 64 < width <= 128 else 64
    columns = 64 if width <= 64 else 128
    tiles = math.ceil(queries / rows) * math.ceil(width / columns)
    size = tiles * (4 * rows * columns + _TILE_HEADER_BYTES)
    if half and width > 128:
        splits = min(math.ceil(keys / 64), max(1, _STAGED_SPLITS // (batch * heads)))
        size += 2 * splits * 64 * _round_up(width, 64) * 4
    return size


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


ATTENTION_INTERNALS: dict[Any, Internal] = {
    aten._scaled_dot_product_cudnn_attention.default: _cudnn_forward,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    aten._scaled_dot_product_flash_attention.default: _flash_forward,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention.default: _efficient_forward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
}
