"""Temporaries of cumulative operators on CUDA."""

from typing import Any

import torch

from ligerprof.runs.simulated.internals.call import Call, Internal
from ligerprof.torch_memory.scans import cumsum_scratch

aten = torch.ops.aten


def _cumsum(call: Call) -> Any:
    source, dim = call.args[:2]
    result = call.run()
    cast_bytes = source.numel() * result.element_size() if source.dtype != result.dtype else 0
    call.device.run_scratch(cumsum_scratch(source.numel(), source.shape[dim], cast_bytes=cast_bytes))
    return result


SCAN_INTERNALS: dict[Any, Internal] = {aten.cumsum.default: _cumsum}
