"""Operators of cuDNN: convolutions, and recurrent layers.

One operator runs all layers and time steps of recurrent layers (aten/src/ATen/native/cudnn/RNN.cpp).
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.backends.cudnn import rnn

from ligerprof.simulated_gpu.plans import GPU, functions, make
from ligerprof.torch_memory import libraries as recurrent
from ligerprof.torch_memory.libraries import Convolution, RecurrentLayers

aten = torch.ops.aten

# operators.Operators, which uses these rules
Operators = Any
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_LEGACY = torch.contiguous_format
# of the whole process, as cuDNN's
_dropout_state: list[Tensor] = []


def install() -> None:
    """Replace torch's choice of a kernel, which looks for cuDNN below the dispatcher."""
    cudnn: Any = torch.backends.cudnn
    cudnn.is_available = lambda: True
    cudnn.is_acceptable = lambda tensor: cudnn.enabled and tensor.is_cuda and tensor.dtype in _DTYPES
    cudnn.version = lambda: recurrent.CUDNN_VERSION
    # torch's own reads numbers of a library that only its builds for CUDA have
    rnn.get_cudnn_mode = lambda name: _MODES[name.lower()]
    functions: Any = torch._VF
    for name, mode in _MODES.items():
        setattr(functions, name, functools.partial(_run, mode, getattr(functions, name)))


def _run(mode: int, function: Callable[..., Any], source: Tensor, *arguments: Any) -> Any:
    """lstm, gru, rnn_tanh or rnn_relu, of padded or packed sequences."""
    if not source.is_cuda or not torch.backends.cudnn.enabled or source.dtype not in _DTYPES:
        return function(source, *arguments)
    is_packed = not isinstance(arguments[2], bool)
    if is_packed:
        batch_sizes, hidden, weights, has_biases, layers, dropout, train, bidirectional = arguments
        batch_sizes, batch_first = batch_sizes.tolist(), False
    else:
        hidden, weights, has_biases, layers, dropout, train, bidirectional, batch_first = arguments
        batch_sizes = []
    state, cell = (hidden[0], hidden[1]) if isinstance(hidden, (list, tuple)) else (hidden, None)
    hidden_size, projected = int(state.shape[2]), 0
    if cell is not None and cell.shape[2] != hidden_size:
        hidden_size, projected = int(cell.shape[2]), hidden_size
    flat = _flat(weights, _elements(weights, has_biases=has_biases))
    per_layer = (4 if has_biases else 2) + bool(projected)
    if train and dropout > 0 and not _dropout_state:
        functions.empty((), dtype=torch.int64, device=GPU).random_().item()
        state_bytes = recurrent.dropout_state_bytes(torch.cuda.get_device_properties(0).multi_processor_count)
        _dropout_state.append(functions.empty(state_bytes, dtype=torch.uint8, device=GPU))
    if torch.is_autocast_enabled("cuda"):
        source, state, cell, weights, flat = _cast(source, state, cell, weights, flat, has_biases=has_biases)
    with torch.autocast("cuda", enabled=False):
        options = (mode, hidden_size, projected, layers, batch_first, dropout, train, bidirectional, batch_sizes)
        dropout_state = _dropout_state[0] if _dropout_state else None
        output, state, cell, *_ = torch._cudnn_rnn(
            source, weights, per_layer, flat, state, cell, *options, dropout_state
        )
    return (output, state, cell) if mode == _MODES["lstm"] else (output, state)


def _cast(source: Any, state: Any, cell: Any, weights: Any, flat: Any, *, has_biases: bool) -> Any:
    """As autocast does (aten/src/ATen/cudnn/AutocastRNN.cpp): in fp16, whatever its dtype is."""
    half = torch.float16
    if weights[0].dtype == torch.float32:
        flat = functions.zeros(_elements(weights, has_biases=has_biases), dtype=half, device=GPU)
        cast = []
        for weight, (begin, _) in zip(weights, _places(weights), strict=True):
            view: Any = functions.empty(0, dtype=half, device=GPU)
            with torch.no_grad():
                view.set_(flat.untyped_storage(), begin, weight.shape)
            cast.append(view.copy_(weight))
        weights = cast
    floats = (None if value is None else value.to(half) for value in (source, state, cell))
    return (*floats, weights, flat)


def _places(weights: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Begin and end of each weight in the flat buffer."""
    ends = [0]
    for weight in weights:
        ends.append(ends[-1] + weight.numel())
    return pairwise(ends)


def _elements(weights: Sequence[Tensor], *, has_biases: bool) -> int:
    """Of cuDNN's buffer, which has two biases per layer and direction in any case."""
    missing = 0 if has_biases else sum(2 * weight.shape[0] for weight in weights[::2])
    return sum(weight.numel() for weight in weights) + missing


def _flat(weights: Sequence[Tensor], elements: int) -> Tensor | None:
    """The buffer that all weights are views of, None if they are not."""
    first = weights[0]
    with torch.no_grad():
        for weight, (begin, _) in zip(weights, _places(weights), strict=True):
            if weight.data_ptr() != first.data_ptr() + begin * first.element_size():
                return None
        try:
            return first.detach().as_strided((elements,), (1,), 0)
        except RuntimeError:
            # the storage ends before
            return None


def _flatten(_run: Operators, _func: Any, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Tensor:
    weights, per_layer, proj_size = args[0], args[1], args[5]
    flat = functions.zeros(
        _elements(weights, has_biases=per_layer - bool(proj_size) == 4), dtype=weights[0].dtype, device=GPU
    )
    views = [flat[begin:end].view(weight.shape) for weight, (begin, end) in zip(weights, _places(weights), strict=True)]
    for weight, view in zip(weights, views, strict=True):
        view.copy_(weight)
    for weight, view in zip(weights, views, strict=True):
        weight.set_(view)
    return flat


def _layers(source: Tensor, options: Sequence[Any]) -> RecurrentLayers:
    """The problem as cuDNN sees it; `options` are the operators' arguments from `mode` on."""
    mode, hidden_size, projected, layers, batch_first, dropout, _train, bidirectional, batch_sizes = options
    if batch_sizes:
        steps, batch = len(batch_sizes), batch_sizes[0]
    else:
        steps, batch = source.shape[:2][:: -1 if batch_first else 1]
    return RecurrentLayers(
        mode=mode,
        steps=steps,
        batch=batch,
        rows=int(source.shape[0]) if batch_sizes else steps * batch,
        input_size=int(source.shape[-1]),
        hidden_size=hidden_size,
        projected_size=projected,
        layers=layers,
        directions=2 if bidirectional else 1,
        dropout=dropout,
        width=source.element_size(),
    )


def _forward(_run: Operators, _func: Any, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Any:
    source, weights, per_layer, flat, state, cell, _mode, hidden_size, projected, _, batch_first, _, train = args[:13]
    batch_sizes, problem = args[14], _layers(source, args[6:15])
    is_turned = batch_first and not batch_sizes
    if is_turned:
        source = source.transpose(0, 1)
    contiguous = source.contiguous()
    width = problem.directions * (projected or hidden_size)
    output = source.new_empty((*source.shape[:-1], width))
    last = torch.empty_like(state, memory_format=_LEGACY)
    last_cell = state.new_empty(0) if cell is None else torch.empty_like(cell, memory_format=_LEGACY)
    if flat is None:
        flat = source.new_empty(_elements(weights, has_biases=per_layer >= 4)).zero_()
        for weight, (begin, end) in zip(weights, _places(weights), strict=True):
            flat[begin:end].view(weight.shape).copy_(weight)
    workspace_bytes, reserve_bytes = recurrent.spaces(problem, train=train)
    workspace = functions.empty(workspace_bytes, dtype=torch.uint8, device=GPU)
    reserve = functions.empty(reserve_bytes, dtype=torch.uint8, device=GPU)
    del workspace, contiguous
    if is_turned:
        output.transpose_(0, 1)
    return output, last, last_cell, reserve, flat


def _backward(_run: Operators, _func: Any, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Any:
    source, weights, per_layer, flat, state, cell, output, given, given_state, given_cell = args[:10]
    batch_first, batch_sizes, needed = args[14], args[18], args[21]
    if given is None and given_state is None and given_cell is None:
        return None, None, None, [None] * len(weights)
    workspace_bytes, _ = recurrent.spaces(_layers(source, args[10:19]), train=True)
    given = torch.zeros_like(output, memory_format=_LEGACY) if given is None else given
    given_state = torch.zeros_like(state, memory_format=_LEGACY) if given_state is None else given_state
    if cell is not None and given_cell is None:
        given_cell = torch.zeros_like(cell, memory_format=_LEGACY)
    is_turned = batch_first and not batch_sizes
    if is_turned:
        source, given = source.transpose(0, 1), given.transpose(0, 1)
    contiguous, given_contiguous = source.contiguous(), given.contiguous()
    source_gradient = torch.empty_like(source, memory_format=_LEGACY)
    state_contiguous = given_state.contiguous()
    cell_contiguous = None if given_cell is None else given_cell.contiguous()
    state_gradient = torch.empty_like(state, memory_format=_LEGACY)
    cell_gradient = None if cell is None else torch.empty_like(cell, memory_format=_LEGACY)
    workspace = functions.empty(workspace_bytes, dtype=torch.uint8, device=GPU)
    del workspace, state_contiguous, cell_contiguous, given_contiguous, contiguous
    if is_turned:
        source_gradient.transpose_(0, 1)
    gradients = []
    if needed[3]:
        contiguous = source.contiguous()
        buffer = functions.zeros(flat.shape, dtype=flat.dtype, device=GPU)
        workspace = functions.empty(workspace_bytes, dtype=torch.uint8, device=GPU)
        places = zip(weights, _places(weights), strict=True)
        gradients = [buffer[begin:end].view(weight.shape) for weight, (begin, end) in places]
        if per_layer < 4:
            # cuDNN's buffer has biases, so that its gradients are copied
            gradients = [gradient.clone() for gradient in gradients]
        del workspace, contiguous
    return source_gradient, state_gradient, cell_gradient, gradients


RECURRENT_RULES: dict[Any, Callable[..., Any]] = {
    aten._cudnn_rnn_flatten_weight.default: _flatten,
    aten._cudnn_rnn.default: _forward,
    aten._cudnn_rnn_backward.default: _backward,
}


# convolutions: workspaces, and copies into one layout (aten/src/ATen/native/Convolution.cpp)
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


def _convolution(run: Operators, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    source, weight, _bias, stride, _padding, _dilation, transposed, _output_padding, groups = args
    layout = _layout(source, weight)
    if source.dtype != weight.dtype:
        raise RuntimeError(f"Input type ({source.type()}) and weight type ({weight.type()}) should be the same")
    if not torch.backends.cudnn.enabled or not weight.numel():
        return run.compute(func, args, kwargs)
    source, weight = source.contiguous(memory_format=layout), weight.contiguous(memory_format=layout)
    result = run.compute(func, (source, weight, *args[2:]), kwargs)
    problem = _problem(source, weight, result, (stride, transposed, groups, layout))
    run.device.touch(problem.forward_bytes())
    return result


def _convolution_backward(run: Operators, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
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
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
}
