"""Temporaries of cumulative operators on CUDA."""

from typing import Any

import torch

from ligerprof.runs.simulated.internals.call import Call, Internal
from ligerprof.runs.simulated.internals.cub import SHORT_SCAN_TILE, scan_bytes

aten = torch.ops.aten


def _cumsum(call: Call) -> Any:
    """Casts its input to the result's type first (aten/src/ATen/native/ReduceOps.cpp, impl_func_cum_ops).

    One row alone goes to CUB's scan, which keeps states of its tiles (ScanUtils.cuh, scan_dim).
    """
    source, dim = call.args[:2]
    result = call.run()
    cast_bytes = source.numel() * result.element_size() if source.dtype != result.dtype else 0
    with call.device.held(cast_bytes):
        if source.shape[dim] == source.numel():
            call.device.touch(scan_bytes(source.numel(), SHORT_SCAN_TILE))
    return result


SCAN_INTERNALS: dict[Any, Internal] = {aten.cumsum.default: _cumsum}
