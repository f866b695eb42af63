"""What CUDA's fused attention kernels save for backward, and what they allocate while they run.

Read in aten/src/ATen/native/transformers/cuda (attention.cu, attention_backward.cu, flash_attn/flash_api.cpp,
mem_eff_attention/kernel_backward.h) and aten/src/ATen/native/cudnn/MHA.cpp; every size was measured on one H200 with
torch 2.11, whose sm80 kernels are those of older GPUs too.
"""

from math import ceil

from ligerprof.gpus import GpuSpec
from ligerprof.torch_memory.attention.selection import AttentionKernel, AttentionProblem
from ligerprof.torch_memory.dtypes import FP32_BYTES, INDEX_BYTES
from ligerprof.torch_memory.scratch import Scratch, together

_CUDNN_WORKSPACE_BYTES = 256
# scaled_dot_product_attention pads the last axis for flash (pad_last_dim<8>)
_FLASH_ALIGNMENT = 8
_FLASH_ROWS = 128
_FLASH_QUERY_TILE = 64
_SPLIT_EFFICIENCY = 0.85
_LARGEST_SPLIT = 128
# kAlignLSE: rows of the memory-efficient kernel's log-sum-exp come in multiples of it
_EFFICIENT_ROWS = 32
# mem_eff_alignment in pad_bias
_MASK_ALIGNMENT = 8
# GradQTempStorage carries a lock, a counter and padding next to its tile
_TILE_HEADER_BYTES = 16
_STAGED_SPLITS = 200


def flash_padding(head_dim: int) -> int:
    """Elements that scaled_dot_product_attention adds to each head before flash attention."""
    return -head_dim % _FLASH_ALIGNMENT


def mask_padding(keys: int) -> int:
    """Elements that it adds to each row of the memory-efficient kernel's mask (pad_bias)."""
    return -keys % _MASK_ALIGNMENT


def log_sum_exp_bytes(kernel: AttentionKernel, problem: AttentionProblem) -> int:
    """Bytes of the softmax statistics, one fp32 number per row of the scores; some kernels pad the rows."""
    if kernel is not AttentionKernel.EFFICIENT:
        return FP32_BYTES * problem.rows
    padded = _round_up(problem.queries, _EFFICIENT_ROWS) if problem.needs_gradient else 0
    return FP32_BYTES * problem.batch * problem.heads * padded


def random_state_sizes(kernel: AttentionKernel) -> tuple[int, ...]:
    """Bytes of each tensor on the GPU that holds seed and offset of dropout; the memory-efficient kernel has none."""
    return {
        AttentionKernel.CUDNN: (INDEX_BYTES, INDEX_BYTES),
        AttentionKernel.FLASH: (2 * INDEX_BYTES, INDEX_BYTES),
    }.get(kernel, ())


def forward_scratch(kernel: AttentionKernel, problem: AttentionProblem, gpu: GpuSpec) -> Scratch:
    """What the forward kernel allocates beyond its results."""
    if kernel is AttentionKernel.CUDNN:
        return together(_CUDNN_WORKSPACE_BYTES)
    if kernel is AttentionKernel.FLASH:
        return together(*flash_split_sizes(problem, gpu))
    # 16-bit heads wider than 128 are accumulated in fp32 outside of registers
    wide = problem.is_half and problem.head_dim > 128
    return together(FP32_BYTES * problem.rows * problem.head_dim if wide else 0)


def backward_scratch(kernel: AttentionKernel, problem: AttentionProblem) -> Scratch:
    """What the backward kernel allocates beyond the gradients."""
    return {
        AttentionKernel.CUDNN: _cudnn_backward,
        AttentionKernel.FLASH: _flash_backward,
        AttentionKernel.EFFICIENT: _efficient_backward,
    }[kernel](problem)


def _cudnn_backward(problem: AttentionProblem) -> Scratch:
    """An fp32 accumulator of the query's gradient and row sums; with grouped heads, ungrouped gradients of K and V."""
    workspace_bytes = FP32_BYTES * problem.rows * (problem.head_dim + 1) + _CUDNN_WORKSPACE_BYTES
    if problem.kv_heads != problem.heads:
        keys = problem.batch * problem.heads * problem.keys
        workspace_bytes += keys * (problem.head_dim + problem.value_dim) * problem.element_bytes
    return together(workspace_bytes)


def flash_split_sizes(problem: AttentionProblem, gpu: GpuSpec) -> tuple[int, ...]:
    """fp32 row sums and partial outputs, where there are too few blocks for the GPU and keys are split (mha_fwd)."""
    splits = _flash_splits(problem, gpu) if problem.dropout == 0.0 else 1
    if splits == 1:
        return ()
    rows_bytes = FP32_BYTES * splits * problem.rows
    return rows_bytes, rows_bytes * _round_up(problem.head_dim, 32)


def _flash_splits(problem: AttentionProblem, gpu: GpuSpec) -> int:
    """num_splits_heuristic of flash_api.cpp."""
    key_tile = 256 if problem.head_dim <= 64 else 128 if problem.head_dim <= 128 else 64
    blocks = problem.batch * problem.heads * ceil(problem.queries / _FLASH_QUERY_TILE)
    places = 2 * gpu.sm_count
    if blocks >= 0.8 * places:
        return 1
    tiles = ceil(problem.keys / key_tile)
    efficiency = {}
    for splits in range(1, min(_LARGEST_SPLIT, places, tiles) + 1):
        if splits == 1 or ceil(tiles / splits) != ceil(tiles / (splits - 1)):
            waves = blocks * splits / places
            efficiency[splits] = waves / ceil(waves)
    best = max(efficiency.values())
    return next(splits for splits, share in efficiency.items() if share >= _SPLIT_EFFICIENCY * best)


def _flash_backward(problem: AttentionProblem) -> Scratch:
    """Row sums and the query's gradient in fp32; with grouped heads, ungrouped gradients of K and V (mha_bwd)."""
    width = problem.head_dim
    rows_bytes = FP32_BYTES * problem.batch * problem.heads * _round_up(problem.queries, _FLASH_ROWS)
    columns = _round_up(width, 32 if width <= 128 else 64)
    grouped = problem.kv_heads != problem.heads
    ungrouped_bytes = problem.batch * problem.heads * problem.keys * width * problem.element_bytes if grouped else 0
    return together(rows_bytes, rows_bytes * columns, ungrouped_bytes, ungrouped_bytes)


def _efficient_backward(problem: AttentionProblem) -> Scratch:
    """The row sums `delta` and a workspace; in fp32 the kernel does not compute delta itself.

    It is a product, its sum, and the sum with its axes in order then.
    """
    delta_bytes = FP32_BYTES * problem.rows
    product_bytes = delta_bytes * problem.head_dim
    workspace_bytes = problem.batch * problem.heads * _efficient_workspace_bytes(problem)
    made = (
        (delta_bytes,) if problem.is_half else (product_bytes, delta_bytes, delta_bytes, -delta_bytes, -product_bytes)
    )
    return (*made, workspace_bytes, -delta_bytes, -workspace_bytes)


def _efficient_workspace_bytes(problem: AttentionProblem) -> int:
    """Per head: tiles of the query's gradient, staged gradients of K and V (workspace_elements_gq, _gk, _gv)."""
    width = problem.head_dim
    rows = 128 if problem.is_half and 64 < width <= 128 else 64
    columns = 64 if width <= 64 else 128
    tiles = ceil(problem.queries / rows) * ceil(width / columns)
    size_bytes = tiles * (FP32_BYTES * rows * columns + _TILE_HEADER_BYTES)
    if problem.is_half and width > 128:
        splits = min(ceil(problem.keys / 64), max(1, _STAGED_SPLITS // (problem.batch * problem.heads)))
        size_bytes += 2 * splits * 64 * _round_up(width, 64) * FP32_BYTES
    return size_bytes


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
