"""Buffers of CUDA's foreach reductions."""

from typing import Any

import torch

from ligerprof.runs.simulated.internals.call import Call, Internal
from ligerprof.torch_memory.foreach import norm_partials_bytes

aten = torch.ops.aten


def _foreach_norm(call: Call) -> Any:
    with call.device.held(norm_partials_bytes(tensor.numel() for tensor in call.args[0])):
        return call.run()


FOREACH_INTERNALS: dict[Any, Internal] = {aten._foreach_norm.Scalar: _foreach_norm}
