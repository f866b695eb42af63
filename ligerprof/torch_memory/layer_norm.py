"""What native_layer_norm keeps for backward and allocates in backward on CUDA.

aten/src/ATen/native/cuda/layer_norm_kernel.cu.
"""

from ligerprof.gpus import GpuSpec
from ligerprof.torch_memory.dtypes import FP32_BYTES, Scratch
from ligerprof.torch_memory.reductions import column_sum_scratch

# LaunchGammaBetaBackwardCUDAKernel: block_dim_x, rows_per_block_y, and the grid that it divides among columns
_BLOCK_COLUMNS = 32
_BLOCK_ROWS = 32
_MANY_ROWS = 64 * 1024
_LARGEST_GRID = 64 * 1024 // 2


def statistics_sizes(rows: int) -> tuple[int, int]:
    """Bytes of mean and reciprocal deviation of each row, which layer_norm_cuda keeps in fp32."""
    return rows * FP32_BYTES, rows * FP32_BYTES


def backward_scratch(rows: int, columns: int, weight_bytes: int, gpu: GpuSpec) -> Scratch:
    """Partial gradients of weight and bias over blocks of rows, where rows are many and short, and their sums.

    Args:
        weight_bytes: bytes per element of the weight.
    """
    if rows <= _MANY_ROWS or columns // _BLOCK_COLUMNS >= gpu.sm_count // 2:
        return ()
    partial_rows = min(-(-rows // _BLOCK_ROWS), _LARGEST_GRID // -(-columns // _BLOCK_COLUMNS))
    partial_bytes, sum_bytes = partial_rows * columns * weight_bytes, columns * weight_bytes
    summing = (sum_bytes, *column_sum_scratch(partial_rows, columns, weight_bytes, gpu), -sum_bytes)
    return (partial_bytes, partial_bytes, *summing, *summing, -partial_bytes, -partial_bytes)
