"""Losses and draws whose CUDA code holds more than their results."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ligerprof.simulated_gpu.creation import functions
from ligerprof.simulated_gpu.plans import GPU
from ligerprof.torch_memory.reductions import axes_of, reduction_scratch

aten = torch.ops.aten

# operators.Operators, which uses these rules
Operators = Any
# at::Reduction::None
_NONE = 0


def _elements(args: Sequence[Any], reduction: Any) -> Tensor | None:
    """The loss of each element, on its way to their mean or sum; None if it is the result."""
    if reduction == _NONE or args[0].numel() == 0:
        return None
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
    return functions.empty(shape, dtype=torch.promote_types(args[0].dtype, args[1].dtype), device=GPU)


def _reduce(run: Operators, elements: Tensor) -> None:
    axes = axes_of(elements.shape, elements.stride(), elements.element_size(), ())
    run.device.run_scratch(reduction_scratch(axes, run.device.gpu))


def _scalar_in_place_of_elements(run: Operators, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """mse_loss and smooth_l1_loss: the result keeps the memory of one number per element."""
    result = _elements(args, args[2] if len(args) > 2 else kwargs.get("reduction", 1))
    if result is None:
        return run.compute(func, args, kwargs)
    elements = torch.empty_like(result)
    _reduce(run, elements)
    del elements
    return _known(run, func, args, kwargs, result.resize_(()))


def _binary_cross_entropy(run: Operators, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The mean is copied into the tensor of the elements."""
    result = _elements(args, args[3] if len(args) > 3 else kwargs.get("reduction", 1))
    if result is None:
        return run.compute(func, args, kwargs)
    mean = functions.empty((), dtype=result.dtype, device=GPU)
    _reduce(run, result)
    del mean
    return _known(run, func, args, kwargs, result.resize_(()))


def _huber(run: Operators, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    elements = _elements(args, args[2] if len(args) > 2 else kwargs.get("reduction", 1))
    result = run.compute(func, args, kwargs)
    if elements is not None:
        _reduce(run, elements)
    return result


def _known(run: Operators, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor) -> Tensor:
    run.values.after(func, args, kwargs, result, [value for value in args if isinstance(value, Tensor)])
    return result


def draw(source: Tensor, count: int, *, replacement: bool) -> None:
    """What multinomial takes besides its result (aten/src/ATen/native/Distributions.cpp)."""
    if replacement and count > 1:
        # the sums of the probabilities, and the probabilities as parts of them
        kept = [torch.empty_like(source) for _ in range(3)]
        del kept
        return
    is_valid = (source.max() < math.inf) & (source.min() >= 0)
    total = source.sum(-1) if source.dim() > 1 else source.sum()
    is_zero = (total == 0).any()
    del total
    weights = torch.empty_like(source)
    del weights, is_valid, is_zero


LOSS_RULES: dict[Any, Callable[..., Any]] = {
    aten.mse_loss.default: _scalar_in_place_of_elements,
    aten.smooth_l1_loss.default: _scalar_in_place_of_elements,
    aten.binary_cross_entropy.default: _binary_cross_entropy,
    aten.huber_loss.default: _huber,
}
