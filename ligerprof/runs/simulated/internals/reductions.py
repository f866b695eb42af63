"""Reductions of fake tensors with the workspaces of CUDA's kernels."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ligerprof.runs.simulated.internals.call import Call, Internal
from ligerprof.torch_memory.reductions import VECTOR, axes_of, reduction_scratch, sum_vector

aten = torch.ops.aten


def reduce_temporaries(
    call: Call, source: Tensor, dims: Sequence[int], *, vector: int = VECTOR, accumulator_bytes: int | None = None
) -> None:
    """Hold and drop the workspaces of one reduction."""
    if source.dim() == 0 or source.numel() == 0:
        return
    axes = axes_of(source.shape, source.stride(), source.element_size(), dims)
    scratch = reduction_scratch(axes, call.device.gpu, vector=vector, accumulator_bytes=accumulator_bytes)
    call.device.run_scratch(scratch)


def _sum(call: Call) -> Any:
    source, dims = call.args[0], call.argument(1, "dim") if call.func is aten.sum.dim_IntList else None
    result = call.run()
    if source.dtype != result.dtype and not (source.element_size() == 2 and result.dtype == torch.float32):
        # make_reduction_from_ty (ReduceOpsUtils.h) casts all but 16 bits that are summed in fp32
        call.device.touch(source.numel() * result.element_size())
    reduce_temporaries(call, source, dims or (), vector=sum_vector(source.element_size()))
    return result


def _over_dims(call: Call) -> Any:
    result = call.run()
    reduce_temporaries(call, call.args[0], _dims(call.argument(1, "dim")))
    return result


def _over_all(call: Call) -> Any:
    result = call.run()
    reduce_temporaries(call, call.args[0], ())
    return result


def _vector_norm(call: Call) -> Any:
    """aten/src/ATen/native/cuda/ReduceNormKernel.cu accumulates in fp32."""
    result = call.run()
    reduce_temporaries(call, call.args[0], _dims(call.argument(2, "dim")))
    return result


def _extreme(call: Call) -> Any:
    """Accumulated in the type of the input (ReduceLogicKernel.cu, ReduceMaxValuesKernel.cu)."""
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
    aten.mean.dim: _over_dims,
    aten.mean.default: _over_all,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.amax.default: _extreme,
    aten.amin.default: _extreme,
    aten.max.default: _extreme,
    aten.min.default: _extreme,
    **dict.fromkeys(_TRUTHS, _extreme),
}
