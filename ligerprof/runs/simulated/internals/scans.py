"""Temporaries of cumulative operators on CUDA."""

from typing import Any

import torch

from ligerprof.runs.simulated.internals.call import Call, Internal

aten = torch.ops.aten


def _cumsum(call: Call) -> Any:
    """Casts its input to the result's type first (aten/src/ATen/native/ReduceOps.cpp, impl_func_cum_ops)."""
    source = call.args[0]
    result = call.run()
    if source.dtype != result.dtype:
        call.device.touch(source.numel() * result.element_size())
    return result


SCAN_INTERNALS: dict[Any, Internal] = {aten.cumsum.default: _cumsum}
