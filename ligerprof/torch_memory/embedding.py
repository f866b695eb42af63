"""The dense gradient of an embedding on CUDA: the blocks that sort the indices and sum rows of equal index.

aten/src/ATen/native/cuda/Embedding.cu (embedding_dense_backward_cuda) and EmbeddingBackwardKernel.cu
(embedding_backward_cuda_kernel), in their order.
"""

from dataclasses import dataclass

from ligerprof.torch_memory.cub import LONG_SCAN_TILE, SHORT_SCAN_TILE, scan_bytes, sort_bytes
from ligerprof.torch_memory.dtypes import FP32_BYTES, INDEX_BYTES

# up to here one kernel without a sort
_UNSORTED_INDICES = 3072
# rows of one segment that one block adds up, and the warp that columns are rounded up to
ROWS_PER_PART = 10
_WARP = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingGradient:
    """Bytes of each block, in the order of allocation.

    Attributes:
        index_bytes: sorted and original indices, which stay; the range that is sorted, and the rank of each index.
        sort_bytes: CUB's storage for the sort, next to the range.
        count_bytes: the number of segments, on the GPU.
        rank_scan_bytes: CUB's storage for the scan that finds segments, next to the ranks' input.
        segment_bytes: each of the segments' starts and numbers of parts.
        segment_scan_bytes: CUB's storage for the scan over segments.
        part_sizes: the number of parts, where each begins, and their fp32 sums.
    """

    index_bytes: int
    sort_bytes: int
    count_bytes: int
    rank_scan_bytes: int
    segment_bytes: int
    segment_scan_bytes: int
    part_sizes: tuple[int, ...]

    @property
    def sum_bytes(self) -> int:
        """The most that is allocated next to the gradient, once that is there."""
        summing_bytes = 2 * self.segment_bytes + max(self.segment_scan_bytes, sum(self.part_sizes))
        ranking_bytes = self.index_bytes + self.rank_scan_bytes
        return 3 * self.index_bytes + self.count_bytes + max(ranking_bytes, summing_bytes)


def embedding_gradient(indices: int, rows: int, columns: int, *, width: int = INDEX_BYTES) -> EmbeddingGradient | None:
    """What the gradient of a table of `rows` by `columns` takes; None for so few indices that they are not sorted.

    Args:
        width: bytes per index.
    """
    if indices <= _UNSORTED_INDICES:
        return None
    return sorted_gradient(indices, rows, columns, width=width)


def sorted_gradient(indices: int, rows: int, columns: int, *, width: int = INDEX_BYTES) -> EmbeddingGradient:
    """The same for any number of indices, as sums and means of bags have it (EmbeddingBag.cu)."""
    segments = min(indices, rows)
    parts = indices // ROWS_PER_PART + segments
    padded_columns = -(-columns // _WARP) * _WARP
    return EmbeddingGradient(
        index_bytes=indices * width,
        sort_bytes=sort_bytes(indices, width, width),
        count_bytes=INDEX_BYTES,
        rank_scan_bytes=scan_bytes(indices, LONG_SCAN_TILE),
        segment_bytes=segments * INDEX_BYTES,
        segment_scan_bytes=scan_bytes(segments, SHORT_SCAN_TILE),
        part_sizes=(INDEX_BYTES, parts * INDEX_BYTES, parts * padded_columns * FP32_BYTES),
    )
