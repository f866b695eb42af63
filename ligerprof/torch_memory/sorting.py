"""Temporaries of torch.sort on CUDA (aten/src/ATen/native/cuda/Sort.cpp and Sort.cu)."""

from ligerprof.torch_memory.cub import partial_sort_bytes, sort_bytes
from ligerprof.torch_memory.dtypes import INDEX_BYTES
from ligerprof.torch_memory.scratch import Scratch, together

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
