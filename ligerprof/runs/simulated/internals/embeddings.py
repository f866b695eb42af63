"""Sort buffers of the embedding's gradient on CUDA.

aten/src/ATen/native/cuda/Embedding.cu (embedding_dense_backward_cuda) and EmbeddingBackwardKernel.cu
(embedding_backward_cuda_kernel), in their order.
"""

from typing import Any

import torch

from ligerprof.runs.simulated.internals.call import Call, Internal
from ligerprof.runs.simulated.internals.cub import LONG_SCAN_TILE, SHORT_SCAN_TILE, scan_bytes, sort_bytes

aten = torch.ops.aten

# up to here one kernel without a sort
_UNSORTED_INDICES = 3072
# rows of one segment that one block adds up, and the warp its columns are rounded to
_ROWS_PER_PART = 10
_WARP = 32


def _embedding_dense_backward(call: Call) -> Any:
    indices = call.args[1]
    count = indices.numel()
    if count <= _UNSORTED_INDICES:
        return call.run()
    index_bytes = count * indices.element_size()
    device = call.device
    # sorted_indices and orig_indices stay; the sort drops its range and CUB's double buffer
    with device.held(index_bytes, index_bytes):
        device.touch(index_bytes, sort_bytes(count, indices.element_size()))
        result = call.run()
        _sum_segments(call, count, index_bytes, result)
    return result


def _sum_segments(call: Call, count: int, index_bytes: int, result: Any) -> None:
    device = call.device
    rows, columns = result.shape
    segments = min(count, rows)
    segment_bytes = segments * 8
    parts = count // _ROWS_PER_PART + segments
    padded_columns = -(-columns // _WARP) * _WARP
    with device.held(index_bytes, 8):
        device.touch(index_bytes, scan_bytes(count, LONG_SCAN_TILE))
        with device.held(segment_bytes, segment_bytes):
            device.touch(scan_bytes(segments, SHORT_SCAN_TILE))
            device.touch(8, parts * 8, parts * padded_columns * 4)


EMBEDDING_INTERNALS: dict[Any, Internal] = {aten.embedding_dense_backward.default: _embedding_dense_backward}
