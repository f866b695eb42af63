"""Temporaries of cumulative operators on CUDA."""

from ligerprof.torch_memory.cub import SHORT_SCAN_TILE, scan_bytes
from ligerprof.torch_memory.scratch import Scratch, together


def cumsum_scratch(elements: int, extent: int, *, cast_bytes: int) -> Scratch:
    """A cumsum over a dimension of `extent` out of `elements`.

    Its input is cast to the result's type first (aten/src/ATen/native/ReduceOps.cpp, impl_func_cum_ops). A single row
    goes to CUB's scan, which keeps the states of its tiles (ScanUtils.cuh, scan_dim).

    Args:
        cast_bytes: bytes of the input in the result's type, 0 if it has that type.
    """
    return together(cast_bytes, scan_bytes(elements, SHORT_SCAN_TILE) if extent == elements else 0)
