"""Sort buffers of the embedding's gradient on CUDA.

aten/src/ATen/native/cuda/Embedding.cu (embedding_dense_backward_cuda) and EmbeddingBackwardKernel.cu
(embedding_backward_cuda_kernel), in their order.
"""

from typing import Any

import torch

from ligerprof.runs.simulated.internals.call import Call, Internal

aten = torch.ops.aten

# up to here one kernel without a sort
_UNSORTED_INDICES = 3072
# rows of one segment that one block adds up, and the warp its columns are rounded to
_ROWS_PER_PART = 10
_WARP = 32
# CUB's DeviceRadixSort in one sweep: 8 passes of 256 counters of 8 bytes, a row of pass counters, and alignment; for
# each tile 256 counters of 4 bytes. Its tiles and those of the two scans are as an H200 has them.
_ALIGNMENT = 256
_SORT_BYTES = 8 * 256 * 8 + 256 + 255
_SORT_TILE_BYTES = 256 * 4
_SORT_TILE = 384 * 12
# CUB's DeviceScan: a state of 16 bytes for each tile and for 32 more, and alignment
_SCAN_STATE_BYTES = 16
_FIRST_SCAN_TILE = 384 * 12
_SECOND_SCAN_TILE = 128 * 7


def _embedding_dense_backward(call: Call) -> Any:
    indices = call.args[1]
    count = indices.numel()
    if count <= _UNSORTED_INDICES:
        return call.run()
    index_bytes = count * indices.element_size()
    device = call.device
    # sorted_indices and orig_indices stay; the sort drops its range and CUB's double buffer
    with device.held(index_bytes, index_bytes):
        sort_bytes = _SORT_BYTES + -(-count // _SORT_TILE) * _SORT_TILE_BYTES
        device.touch(index_bytes, 2 * _aligned(index_bytes) + sort_bytes)
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
        device.touch(index_bytes, _scan_bytes(count, _FIRST_SCAN_TILE))
        with device.held(segment_bytes, segment_bytes):
            device.touch(_scan_bytes(segments, _SECOND_SCAN_TILE))
            device.touch(8, parts * 8, parts * padded_columns * 4)


def _scan_bytes(count: int, tile: int) -> int:
    return _aligned((32 + -(-count // tile)) * _SCAN_STATE_BYTES) + 2 * _ALIGNMENT - 1


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT


EMBEDDING_INTERNALS: dict[Any, Internal] = {aten.embedding_dense_backward.default: _embedding_dense_backward}
