"""Copies of indices, and numbers that CUDA's operators put on the device."""

from collections.abc import Sequence

from ligerprof.torch_memory.cub import sort_bytes
from ligerprof.torch_memory.dtypes import INDEX_BYTES
from ligerprof.torch_memory.scratch import Scratch, together

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
