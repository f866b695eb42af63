"""Copies of indices that CUDA makes to give all of them the same strides."""

from typing import Any

import torch

from ligerprof.runs.simulated.internals.call import Call, Internal

aten = torch.ops.aten


def _index(call: Call) -> Any:
    """Several indices are broadcast and copied (aten/src/ATen/native/TensorAdvancedIndexing.cpp, AdvancedIndex)."""
    indices = [index for index in call.args[1] if index is not None and index.dtype != torch.bool]
    if len(indices) < 2:
        return call.run()
    broadcast = torch.broadcast_tensors(*indices)  # type: ignore[no-untyped-call]
    if len({index.stride() for index in broadcast}) == 1:
        return call.run()
    copies = [index.numel() * index.element_size() for index in broadcast if not index.is_contiguous()]
    with call.device.held(*copies):
        return call.run()


INDEX_INTERNALS: dict[Any, Internal] = {aten.index.Tensor: _index}
