"""Comparisons: of large floats that the program copied to the GPU, such as images, and with infinity.

Nothing else is computed with such floats. A program asks in this way which of its images are padding, for example. What
a model computes is finite.
"""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ligerprof.simulated_gpu.loading import is_weight
from ligerprof.simulated_gpu.values import Values, address_of, is_small

aten = torch.ops.aten

# what is kept at once; the oldest go first
_MOST_BYTES = 256 << 20
_NAMES = ("eq", "ne", "lt", "le", "gt", "ge")


def copy_from_host(values: Values, target: Tensor, source: Tensor) -> None:
    """Keep the values of a tensor that the program copies from main memory, unless it is a weight."""
    if not source.requires_grad and not is_weight(source):
        _keep(values, target, source)


def copy_on_gpu(values: Values, target: Tensor, source: Tensor) -> None:
    """Keep the values of a copy of a tensor whose values are kept."""
    found = shown(values, source)
    if found is not None:
        _keep(values, target, found)


def shown(values: Values, tensor: Tensor) -> Tensor | None:
    """The kept values of a tensor on the GPU, in main memory."""
    kept = values.inputs.get(address_of(tensor)) if values.inputs and tensor.is_cuda else None
    if kept is None:
        return None
    return kept.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _keep(values: Values, target: Tensor, source: Tensor) -> None:
    size_bytes = target.nbytes
    if not target.is_floating_point() or is_small(target) or size_bytes > _MOST_BYTES or not values.covers(target):
        return
    address = address_of(target)
    values.inputs.pop(address, None)
    while values.inputs and sum(kept.nbytes for kept in values.inputs.values()) + size_bytes > _MOST_BYTES:
        del values.inputs[next(iter(values.inputs))]
    # the program does not hold this copy: what counts its main memory does not see it
    with _disable_current_modes():
        copy = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype).copy_(source)
    values.inputs[address] = copy.as_strided((copy.numel(),), (1,)).view(torch.uint8)


def _compared(run: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    result: Tensor = run.compute(func, args, kwargs)
    if run.values.known(result) is not None:
        return result
    found = [_in_main_memory(run.values, value) for value in args] if run.values.inputs else [None]
    if not any(value is None for value in found):
        run.values.set(result, func(*found), at_any_size=True)
    elif (answer := _of_finite(func, args)) is not None:
        run.values.filled[address_of(result)] = answer
    return result


def _of_finite(func: Any, args: Sequence[Any]) -> bool | None:
    """What floats that a model computes, which are finite, give where isinf, isnan and isfinite compare them."""
    if not args[0].is_floating_point():
        return None
    is_itself = func is not aten.isnan.default and args[1] is args[0]
    if func is aten.isnan.default or (is_itself and func is aten.ne.Tensor):
        return False
    if is_itself and func is aten.eq.Tensor:
        return True
    if func in (aten.eq.Scalar, aten.ne.Scalar) and args[1] in (inf, -inf):
        return func is aten.ne.Scalar
    return None


def _in_main_memory(values: Values, value: Any) -> Any:
    kept = shown(values, value) if isinstance(value, Tensor) else None
    return values.real(value) if kept is None else kept


COMPARISONS = dict.fromkeys(
    [
        *(getattr(aten, name).Scalar for name in _NAMES),
        *(getattr(aten, name).Tensor for name in _NAMES),
        aten.isnan.default,
    ],
    _compared,
)
