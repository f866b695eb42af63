"""Reductions with the workspaces of CUDA's kernels."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ligerprof.simulated_gpu.internals.call import Call, Internal
from ligerprof.torch_memory.reductions import VECTOR, axes_of, reduction_scratch, sum_vector

aten = torch.ops.aten


def reduce_temporaries(
    call: Call, source: Tensor, dims: Sequence[int], *, vector: int = VECTOR, accumulator_bytes: int | None = None
) -> None:
    """Allocate and free the workspaces of one reduction."""
    if source.dim() == 0 or source.numel() == 0:
        return
    axes = axes_of(source.shape, source.stride(), source.element_size(), dims)
    scratch = reduction_scratch(axes, call.device.gpu, vector=vector, accumulator_bytes=accumulator_bytes)
    call.device.run_scratch(scratch)


def _sum(call: Call) -> Any:
    source, dims = call.args[0], call.argument(1, "dim") if call.func is aten.sum.dim_IntList else None
    result = call.run()
    if source.dtype != result.dtype and not (source.element_size() == 2 and result.dtype == torch.float32):
        # make_reduction_from_ty (ReduceOpsUtils.h) casts, except 16-bit inputs that are summed in fp32
        call.device.touch(source.numel() * result.element_size())
    reduce_temporaries(call, source, dims or (), vector=sum_vector(source.element_size()))
    return result


def _over_dims(position: int | None) -> Internal:
    """A reduction over the dims in the argument at `position`, or over all where that is None."""

    def run(call: Call) -> Any:
        result = call.run()
        reduce_temporaries(call, call.args[0], () if position is None else _dims(call.argument(position, "dim")))
        return result

    return run


def _extreme(call: Call) -> Any:
    """Accumulate in the input's dtype (ReduceLogicKernel.cu, ReduceMaxValuesKernel.cu)."""
    source = call.args[0]
    result = call.run()
    dims = _dims(call.argument(1, "dim")) if len(call.func._schema.arguments) > 1 else ()
    accumulator = 1 if call.func in _TRUTHS else source.element_size()
    reduce_temporaries(call, source, dims, accumulator_bytes=accumulator)
    return result


def _dims(value: Any) -> Sequence[int]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


_TRUTHS = frozenset({aten.all.default, aten.all.dim, aten.all.dims, aten.any.default, aten.any.dim, aten.any.dims})

REDUCTION_INTERNALS: dict[Any, Internal] = {
    aten.sum.dim_IntList: _sum,
    aten.sum.default: _sum,
    aten.mean.dim: _over_dims(1),
    aten.mean.default: _over_dims(None),
    # accumulates in fp32 (aten/src/ATen/native/cuda/ReduceNormKernel.cu)
    aten.linalg_vector_norm.default: _over_dims(2),
    aten.amax.default: _extreme,
    aten.amin.default: _extreme,
    aten.max.default: _extreme,
    aten.min.default: _extreme,
    **dict.fromkeys(_TRUTHS, _extreme),
}
