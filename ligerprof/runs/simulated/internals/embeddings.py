"""Sort buffers of the embedding's gradient on CUDA."""

from typing import Any

import torch

from ligerprof.runs.simulated.internals.call import Call, Internal

aten = torch.ops.aten

# embedding_dense_backward_cuda (aten/src/ATen/native/cuda/Embedding.cu): up to here one kernel without a sort
_UNSORTED_INDICES = 3072
# EmbeddingBackwardKernel.cu: rows of one segment that one block adds up, and the warp its columns are rounded to
_ROWS_PER_PART = 10
_WARP = 32
# temporary storage that CUB asks for: measured on an H200 for radix sort (beyond two index copies) and the scans
_CUB_SORT_BYTES = 18_943
_CUB_SCAN_BYTES = 1_279


def _embedding_dense_backward(call: Call) -> Any:
    indices = call.args[1]
    count = indices.numel()
    if count <= _UNSORTED_INDICES:
        return call.run()
    index_bytes = count * indices.element_size()
    device = call.device
    # embedding_dense_backward_cuda: sorted_indices and orig_indices stay; radix_sort_pairs drops the range and
    # CUB's double buffer
    with device.held(index_bytes, index_bytes):
        device.touch(index_bytes, 2 * count * 8 + _CUB_SORT_BYTES)
        result = call.run()
        _sum_segments(call, count, index_bytes, result)
    return result


def _sum_segments(call: Call, count: int, index_bytes: int, result: Any) -> None:
    """EmbeddingBackwardKernel.cu, embedding_backward_cuda_kernel, in its order."""
    device = call.device
    rows, columns = result.shape
    parts = count // _ROWS_PER_PART + min(count, rows)
    padded_columns = -(-columns // _WARP) * _WARP
    with device.held(index_bytes, 8):
        device.touch(index_bytes, _CUB_SCAN_BYTES)
        with device.held(index_bytes, index_bytes):
            device.touch(_CUB_SCAN_BYTES)
            device.touch(8, parts * 8, parts * padded_columns * 4)


EMBEDDING_INTERNALS: dict[Any, Internal] = {aten.embedding_dense_backward.default: _embedding_dense_backward}
