"""Numbers that CUDA's operators put on the device."""

from typing import Any

import torch

from ligerprof.runs.simulated.internals.call import Call, Internal

aten = torch.ops.aten

_SCALAR_BYTES = 8


def _pow_of_number(call: Call) -> Any:
    """The base becomes a tensor (aten/src/ATen/native/Pow.cpp, pow_Scalar_out)."""
    result = call.run()
    call.device.touch(_SCALAR_BYTES)
    return result


SCALAR_INTERNALS: dict[Any, Internal] = {aten.pow.Scalar: _pow_of_number}
