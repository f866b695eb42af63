"""Copies of indices, and numbers on the device, of fake tensors."""

from typing import Any

import torch

from ligerprof.runs.simulated.internals.call import Call, Internal
from ligerprof.torch_memory.indexing import POW_BASE_SCRATCH, index_copies

aten = torch.ops.aten


def _index(call: Call) -> Any:
    indices = [index for index in call.args[1] if index is not None and index.dtype != torch.bool]
    if len(indices) < 2:
        return call.run()
    broadcast = torch.broadcast_tensors(*indices)  # type: ignore[no-untyped-call]
    described = [(item.stride(), item.numel() * item.element_size(), item.is_contiguous()) for item in broadcast]
    with call.device.held(*index_copies(described)):
        return call.run()


def _pow_of_number(call: Call) -> Any:
    result = call.run()
    call.device.run_scratch(POW_BASE_SCRATCH)
    return result


INDEX_INTERNALS: dict[Any, Internal] = {aten.index.Tensor: _index, aten.pow.Scalar: _pow_of_number}
