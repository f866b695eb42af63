"""Convolutions: cuDNN's workspaces, and copies into one layout (aten/src/ATen/native/Convolution.cpp)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ligerprof.simulated_gpu.plans import make
from ligerprof.torch_memory.libraries import Convolution

aten = torch.ops.aten

# operators.Operators, which uses these rules
Operators = Any
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _layout(source: Tensor, weight: Tensor) -> torch.memory_format:
    """cudnn_conv_suggest_memory_format."""
    wanted = _CHANNELS_LAST.get(source.dim())
    if wanted is None:
        return torch.contiguous_format
    is_last = any(
        tensor.is_contiguous(memory_format=wanted) and not tensor.is_contiguous() for tensor in (source, weight)
    )
    return wanted if is_last else torch.contiguous_format


def _problem(source: Tensor, weight: Tensor, result: Tensor, options: Sequence[Any]) -> Convolution:
    stride, transposed, groups, layout = options
    inner, outer = (result, source) if transposed else (source, result)
    return Convolution(
        source=inner.shape,
        weight=weight.shape,
        result=outer.shape,
        stride=stride,
        groups=groups,
        width=source.element_size(),
        channels_last=layout is not torch.contiguous_format,
    )


def _forward(run: Operators, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    source, weight, _bias, stride, _padding, _dilation, transposed, _output_padding, groups = args
    layout = _layout(source, weight)
    if not torch.backends.cudnn.enabled or not weight.numel():
        return run.compute(func, args, kwargs)
    source, weight = source.contiguous(memory_format=layout), weight.contiguous(memory_format=layout)
    result = run.compute(func, (source, weight, *args[2:]), kwargs)
    problem = _problem(source, weight, result, (stride, transposed, groups, layout))
    run.device.touch(problem.forward_bytes())
    return result


def _backward(run: Operators, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    given, source, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, needed = args
    if not torch.backends.cudnn.enabled or not weight.numel():
        return run.compute(func, args, kwargs)
    layout = _layout(source, weight)
    given, source = given.contiguous(memory_format=layout), source.contiguous(memory_format=layout)
    weight = weight.contiguous(memory_format=layout)
    options = (bias_sizes, stride, padding, dilation, transposed, output_padding, groups, needed)
    plan = run.plan(func, (given, source, weight, *options), kwargs, [])
    problem = _problem(source, weight, given, (stride, transposed, groups, layout))
    of_source, of_weight, of_bias = plan.outputs
    if problem.is_depthwise:
        of_weight = None if of_weight is None else make(of_weight)
        of_source = None if of_source is None else make(of_source)
    else:
        if of_source is not None:
            of_source = make(of_source)
            run.device.touch(problem.forward_bytes(is_gradient=True))
        if of_weight is not None:
            of_weight = make(of_weight)
            run.device.touch(problem.weight_gradient_bytes())
    if of_bias is not None:
        of_bias = given.sum([0, *range(2, given.dim())])
    return of_source, of_weight, of_bias


CONVOLUTION_RULES: dict[Any, Callable[..., Any]] = {
    aten.convolution.default: _forward,
    aten.convolution_backward.default: _backward,
}
