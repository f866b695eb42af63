"""Temporaries of cumulative operators on CUDA."""

from ligerprof.torch_memory.cub import SHORT_SCAN_TILE, scan_bytes
from ligerprof.torch_memory.dtypes import INDEX_BYTES
from ligerprof.torch_memory.scratch import Scratch, together


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
