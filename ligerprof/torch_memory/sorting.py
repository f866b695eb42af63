"""What sorts, scans, indexing and embeddings allocate on CUDA: CUB's temporary storage, and copies of indices."""

from collections.abc import Sequence
from dataclasses import dataclass

from ligerprof.gpus import GpuSpec
from ligerprof.torch_memory.dtypes import FP32_BYTES, INDEX_BYTES, Scratch, together

# allocations of one call are laid out one after the other, each aligned
_ALIGNMENT = 256
# DeviceRadixSort in one sweep: for each pass over 8 bits 256 counters of 8 bytes, and for each tile 256 counters of 4
# bytes; items per tile by bytes of a key
_PASS_BYTES = 256 * 8
_SORT_TILES = {8: 384 * 12, 4: 384 * 14, 2: 512 * 11}
_PARTIAL_SORT_TILE = 384 * 15
_SORT_TILE_BYTES = 256 * 4
# DeviceScan: a state of 16 bytes for each tile and for 32 more
_SCAN_STATE_BYTES = 16
_SCAN_PADDING = 32
# DeviceReduce: numbers of 4 bytes, in one tile or by as many blocks as fit on the GPU five times
_REDUCE_TILE = 256 * 16
_REDUCE_THREADS = 256
_REDUCE_WAVES = 5
# of what nonzero has found (aten/src/ATen/native/cuda/Nonzero.cu)
COUNTER_BYTES = 4
# DeviceSelect by flags: a state of 8 bytes for each tile and for 32 more
_SELECT_TILE = 384 * 11
_SELECT_STATE_BYTES = 8
LONG_SCAN_TILE = 384 * 12
SHORT_SCAN_TILE = 128 * 7


def sort_bytes(count: int, value_bytes: int, key_bytes: int = 8, *, key_bits: int | None = None) -> int:
    """DeviceRadixSort::SortPairs: second buffers of keys and values, and counters.

    Args:
        key_bits: bits of the keys that are compared; None: all.
    """
    passes = key_bytes if key_bits is None else max(-(-key_bits // 8), 1)
    buffers_bytes = _aligned(count * key_bytes) + _aligned(count * value_bytes)
    tile = _SORT_TILES.get(key_bytes, _SORT_TILES[2])
    return buffers_bytes + passes * _PASS_BYTES + _tile_counters_bytes(count, tile)


def partial_sort_bytes(count: int) -> int:
    """DeviceRadixSort over a few bits between two buffers of the caller's."""
    return _PASS_BYTES + _tile_counters_bytes(count, _PARTIAL_SORT_TILE)


def _tile_counters_bytes(count: int, tile: int) -> int:
    return -(-count // tile) * _SORT_TILE_BYTES + 2 * _ALIGNMENT - 1


def scan_bytes(count: int, tile: int) -> int:
    """DeviceScan, or what is built like it, over `count` items in tiles of `tile`."""
    return _aligned((_SCAN_PADDING + -(-count // tile)) * _SCAN_STATE_BYTES) + 2 * _ALIGNMENT - 1


def select_bytes(count: int) -> int:
    """DeviceSelect::Flagged among `count` items."""
    states = _SCAN_PADDING + -(-count // _SELECT_TILE)
    return _aligned(states * _SELECT_STATE_BYTES) + 2 * _ALIGNMENT - 1


def count_bytes(count: int, gpu: GpuSpec) -> int:
    """DeviceReduce::Sum of `count` flags as numbers of 4 bytes."""
    if count <= _REDUCE_TILE:
        return 1
    blocks = gpu.sm_count * (gpu.max_threads_per_sm // _REDUCE_THREADS) * _REDUCE_WAVES
    return _aligned(blocks * 4) + _ALIGNMENT - 1


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT


# should_use_small_sort
_SMALL_ROW = 4096
_LARGE_ROW = 1_000_000
_FEW_ROWS = 128


def sort_scratch(elements: int, row: int, width: int, *, inner: bool) -> Scratch:
    """Blocks besides sorted values and their indices.

    Args:
        row: elements that are sorted together.
        width: bytes per element.
        inner: whether a row is contiguous.
    """
    positions = elements * INDEX_BYTES
    if row <= _SMALL_ROW:
        return together(row * INDEX_BYTES)
    rows = elements // row
    keys = elements * width
    if rows == 1 or row >= _LARGE_ROW:
        return together(row * INDEX_BYTES, sort_bytes(row, INDEX_BYTES, width))
    # copies with the sorted axis last: source, values, indices
    copies = () if inner else (keys, keys, positions)
    sorting: Scratch
    if rows < _FEW_ROWS:
        first, second = sort_bytes(elements, INDEX_BYTES, width), partial_sort_bytes(elements)
        # rows are sorted together with their number, then by it
        sorting = (positions, positions, keys, first, -first, -keys, second, -second, -positions, -positions)
    else:
        buffers = sort_bytes(elements, INDEX_BYTES, width)
        sorting = (positions, buffers, -buffers, -positions)
    return (*copies, *sorting, *(-size for size in reversed(copies)))


def cumsum_scratch(elements: int, extent: int, *, cast_bytes: int) -> Scratch:
    """A cumsum over a dimension of `extent` out of `elements`.

    Its input is cast to the result's type first (aten/src/ATen/native/ReduceOps.cpp, impl_func_cum_ops). A single row
    goes to CUB's scan, which keeps the states of its tiles (ScanUtils.cuh, scan_dim).

    Args:
        cast_bytes: bytes of the input in the result's type, 0 if it has that type.
    """
    return together(cast_bytes, scan_bytes(elements, SHORT_SCAN_TILE) if extent == elements else 0)


def masked_scatter_scratch(elements: int, *, copies_mask: bool) -> Scratch:
    """The sums over the mask, and its copy if it is not contiguous (aten/src/ATen/native/cuda/IndexKernel.cpp)."""
    mask_bytes = elements if copies_mask else 0
    return together(elements * INDEX_BYTES, mask_bytes, scan_bytes(elements, SHORT_SCAN_TILE))


# the base of `number ** tensor` becomes a tensor (aten/src/ATen/native/Pow.cpp, pow_Scalar_out)
POW_BASE_SCRATCH: Scratch = together(INDEX_BYTES)


def index_copies(indices: Sequence[tuple[tuple[int, ...], int, bool]]) -> tuple[int, ...]:
    """Bytes of the copies that indexing by several tensors makes to give all of them the same strides.

    aten/src/ATen/native/TensorAdvancedIndexing.cpp, AdvancedIndex.

    Args:
        indices: strides, bytes, and whether it is contiguous, of each index once all are broadcast.
    """
    if len({strides for strides, _, _ in indices}) <= 1:
        return ()
    return tuple(size_bytes for _, size_bytes, contiguous in indices if not contiguous)


def accumulation_scratch(count: int, dims: int, rows: int) -> Scratch:
    """What index_put with accumulate takes: it sorts linear indices (index_put_with_sort_kernel in Indexing.cu).

    Args:
        count: indices.
        dims: indexed dimensions.
        rows: number of different linear indices.
    """
    item = count * INDEX_BYTES
    # each index is wrapped and multiplied by its stride; the products add up in the first one
    products = (item, item, -item) + (item, item, -item, -item) * (dims - 1)
    sorting_bytes = sort_bytes(count, INDEX_BYTES, key_bits=rows.bit_length())
    return (*products, item, item, item, sorting_bytes, -sorting_bytes, -item, -item, -item, -item)


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
    def scratch(self) -> tuple[Scratch, Scratch]:
        """Blocks before the gradient is there, and those after."""
        index, segment = self.index_bytes, self.segment_bytes
        rank = together(index, self.rank_scan_bytes)
        sums = (*together(self.segment_scan_bytes), *together(*self.part_sizes))
        inner = (index, self.count_bytes, *rank, segment, segment, *sums, -segment, -segment, -self.count_bytes)
        return (index, index, *together(index, self.sort_bytes)), (*inner, -index, -index, -index)


def embedding_scratch(indices: int, rows: int, columns: int, *, width: int = INDEX_BYTES) -> tuple[Scratch, Scratch]:
    """Blocks of the gradient of a table, before it is there and after."""
    blocks = embedding_gradient(indices, rows, columns, width=width)
    return ((), ()) if blocks is None else blocks.scratch


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
