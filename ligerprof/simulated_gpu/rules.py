"""Operators whose result depends on values, or which move values between the GPU and main memory."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from ligerprof.errors import UnsupportedError
from ligerprof.runs.recording.saved import storage_address
from ligerprof.simulated_gpu.attention import allowed_kernels, problem_of
from ligerprof.simulated_gpu.cudnn import CONVOLUTION_RULES, RECURRENT_RULES
from ligerprof.simulated_gpu.internals import hold_workspaces
from ligerprof.simulated_gpu.loading import has_no_values, is_weight, mark_weight
from ligerprof.simulated_gpu.plans import GPU, functions
from ligerprof.simulated_gpu.values import MOST_FLOATS, Values, is_small, place, tensors_in
from ligerprof.torch_memory.attention import AttentionKernel, choose_kernel
from ligerprof.torch_memory.reductions import axes_of, reduction_scratch
from ligerprof.torch_memory.sorting import COUNTER_BYTES, count_bytes, select_bytes

aten = torch.ops.aten

# operators.Operators, which imports this module
Operators = Any
Rule = Callable[[Operators, Any, Sequence[Any], Mapping[str, Any]], Any]

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def _in_parts(_run: Operators, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The CPU's kernel calls the same operators as CUDA's, each of which runs on the tensors' device."""
    return func.redispatch(_CPU, *args, **kwargs)


def _multi_head_attention(run: Operators, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """native_multi_head_attention_cuda: a fused kernel where one takes it, else as on the CPU."""
    query, key, value, width, heads, weight, bias, out_weight, out_bias, *rest = args
    mask, need_weights = (*rest, *(None, True)[len(rest) :])[:2]
    if query is key and key is value and mask is None and not need_weights:
        split = query.view(query.shape[0], -1, heads, width // heads).transpose(1, 2)
        problem = problem_of(split, split, split)
        if choose_kernel(problem, run.device.gpu, allowed_kernels()) is not AttentionKernel.MATH:
            parts = F.linear(query, weight, bias).chunk(3, -1)
            queries, keys, values = (part.view(*query.shape[:2], heads, -1).transpose(1, 2) for part in parts)
            seen = F.scaled_dot_product_attention(queries, keys, values)
            return F.linear(seen.transpose(1, 2).reshape(query.shape), out_weight, out_bias), None
    return _in_parts(run, func, args, kwargs)


def _transform_bias_rescale_qkv(_run: Operators, _func: Any, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Any:
    """transform_bias_rescale_qkv_cuda: query, key and value in one block."""
    packed, _, heads = args
    batch, length, width = packed.shape
    return packed.new_empty((3, batch, heads, length, width // 3 // heads)).unbind(0)


_COMPOSITE_RULES: dict[Any, Rule] = {
    aten._transformer_encoder_layer_fwd.default: _in_parts,
    aten._embedding_bag_backward.default: _in_parts,
    aten._native_multi_head_attention.default: _multi_head_attention,
    aten._transform_bias_rescale_qkv.default: _transform_bias_rescale_qkv,
}
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
    """mse_loss, smooth_l1_loss, binary_cross_entropy: the result keeps the memory of one number per element."""
    is_entropy = func is aten.binary_cross_entropy.default
    position = 3 if is_entropy else 2
    result = _elements(args, args[position] if len(args) > position else kwargs.get("reduction", 1))
    if result is None:
        return run.compute(func, args, kwargs)
    # its mean is copied into the tensor of the elements; the others have the elements apart
    temporary = functions.empty((), dtype=result.dtype, device=GPU) if is_entropy else torch.empty_like(result)
    _reduce(run, result if is_entropy else temporary)
    del temporary
    run.values.after(func, args, kwargs, result.resize_(()), [value for value in args if isinstance(value, Tensor)])
    return result


def _huber(run: Operators, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    elements = _elements(args, args[2] if len(args) > 2 else kwargs.get("reduction", 1))
    result = run.compute(func, args, kwargs)
    if elements is not None:
        _reduce(run, elements)
    return result


def _draw(source: Tensor, count: int, *, replacement: bool) -> None:
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


_LOSS_RULES: dict[Any, Rule] = {
    aten.mse_loss.default: _scalar_in_place_of_elements,
    aten.smooth_l1_loss.default: _scalar_in_place_of_elements,
    aten.binary_cross_entropy.default: _scalar_in_place_of_elements,
    aten.huber_loss.default: _huber,
}


# Large floats that the program copied to the GPU, such as images, are compared by their values, and any with infinity.
# Nothing else is computed with such floats. A program asks in this way which of its images are padding, for example.

# what is kept at once; the oldest go first
_MOST_BYTES = 256 << 20
_NAMES = ("eq", "ne", "lt", "le", "gt", "ge")


def shown(values: Values, tensor: Tensor) -> Tensor | None:
    """The kept values of a tensor on the GPU, in main memory."""
    kept = values.inputs.get(storage_address(tensor)) if values.inputs and tensor.is_cuda else None
    if kept is None:
        return None
    return kept.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _keep(values: Values, target: Tensor, source: Tensor) -> None:
    size_bytes = target.nbytes
    if not target.is_floating_point() or is_small(target) or size_bytes > _MOST_BYTES or not values.covers(target):
        return
    address = storage_address(target)
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
        run.values.filled[storage_address(result)] = answer
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
    if func in (aten.eq.Scalar, aten.ne.Scalar) and args[1] in (math.inf, -math.inf):
        return func is aten.ne.Scalar
    return None


def _in_main_memory(values: Values, value: Any) -> Any:
    kept = shown(values, value) if isinstance(value, Tensor) else None
    return values.real(value) if kept is None else kept


_COMPARISONS = dict.fromkeys(
    [
        *(getattr(aten, name).Scalar for name in _NAMES),
        *(getattr(aten, name).Tensor for name in _NAMES),
        aten.isnan.default,
    ],
    _compared,
)


# numbers that the host receives are written only up to this many
_MOST_HOST_VALUES = 1 << 16
# ids at the end of a vocabulary are often special tokens
_FROM_END = 5
# of nonzero, the number of positions


def _copy(run: Operators, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """copy_ as aten/src/ATen/native/cuda/Copy.cu does it, with its temporaries."""
    # parameters of lazy modules show no shape in Python
    target, source = (tensor.data if is_lazy(tensor) else tensor for tensor in args[:2])
    wait = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    if target.is_cuda and source.is_cuda:
        run.device.addresses.kernels_ran |= target.dtype != source.dtype
        run.values.after(func, (target, source), {}, target, [target, source])
        if (found := shown(run.values, source)) is not None:
            _keep(run.values, target, found)
        return target
    if _needs_temporaries(target, source):
        return _copy_in_steps(target, source, wait=wait)
    if target.is_cuda:
        if source.numel() and run.values.covers(target):
            run.values.forget(storage_address(target))
            run.values.set(target, source)
        else:
            run.values.after(func, (target, source), {}, target, [target, source])
        if not source.requires_grad and not is_weight(source):
            _keep(run.values, target, source)
        return target
    if wait:
        run.device.synchronize(run.device.stream)
    _copy_to_host(run, target, source)
    return target


def _needs_temporaries(target: Tensor, source: Tensor) -> bool:
    """copy_requires_temporaries, for a copy between GPU and main memory."""
    if target.dtype != source.dtype or target.shape != source.shape:
        return True
    dense = torch._C._is_non_overlapping_and_dense if hasattr(torch._C, "_is_non_overlapping_and_dense") else None
    same_order = target.stride() == source.stride() and (dense is None or dense(target))
    return not (same_order or (target.is_contiguous() and source.is_contiguous()))


def _copy_in_steps(target: Tensor, source: Tensor, *, wait: bool) -> Tensor:
    converts_on_gpu = not wait
    if source.is_cuda == converts_on_gpu:
        into = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
        from_ = _cast_on_host(source, target) if target.is_cuda else source.to(target.dtype)
        from_ = from_.expand_as(target).contiguous()
    else:
        same = target.dtype == source.dtype
        into = target
        if not (target.is_contiguous() and same):
            into = torch.empty_like(target, dtype=source.dtype, memory_format=torch.contiguous_format)
        from_ = source.expand_as(target).contiguous()
    into.copy_(from_, non_blocking=not wait)
    if into is not target:
        target.copy_(into, non_blocking=not wait)
    return target


def _cast_on_host(source: Tensor, target: Tensor) -> Tensor:
    """A tensor of main memory in the type of one on the GPU."""
    if not has_no_values(source):
        return source.to(target.dtype)
    cast = torch.empty_like(source, dtype=target.dtype)
    mark_weight(cast)
    return cast


def _copy_to_host(run: Operators, target: Tensor, source: Tensor) -> None:
    values = run.values.copy_of(source)
    if values is None:
        values = shown(run.values, source)
    if values is not None:
        if run.values.is_made_up(source):
            run.values.note(f"copy of {source.dtype} to the host".replace("torch.", ""))
        target.copy_(values)
        return
    run.values.note(f"copy of {source.dtype} to the host".replace("torch.", ""))
    if source.numel() <= _MOST_HOST_VALUES:
        target.fill_(1 if source.dtype.is_floating_point else 0)
    if target.is_floating_point() and target.numel() > MOST_FLOATS:
        mark_weight(target)


def _item(run: Operators, _func: Any, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Any:
    run.device.synchronize(run.device.stream)
    tensor = args[0]
    values = run.values.copy_of(tensor)
    if values is None or run.values.is_made_up(tensor):
        run.values.note(f"item of {tensor.dtype}".replace("torch.", ""))
    if values is not None:
        return values.item()
    return 1.0 if tensor.dtype.is_floating_point else False if tensor.dtype == torch.bool else 1


def _equal(run: Operators, _func: Any, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> bool:
    run.device.synchronize(run.device.stream)
    values = [run.values.copy_of(tensor) if tensor.is_cuda else tensor for tensor in args[:2]]
    if values[0] is not None and values[1] is not None:
        return torch.equal(values[0], values[1])
    run.values.note("equal")
    return bool(args[0].shape == args[1].shape)


def _found(run: Operators, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Operators whose result's shape depends on values: from the values, else by a rule that is listed."""
    tensors = list(tensors_in((args, tuple(kwargs.values()))))
    copies = [run.values.copy_of(tensor) if tensor.is_cuda else tensor for tensor in tensors]
    is_made_up = any(map(run.values.is_made_up, tensors))
    run.device.synchronize(run.device.stream)
    if all(copy is not None for copy in copies):
        result = func(*(run.values.real(value) for value in args), **{k: run.values.real(v) for k, v in kwargs.items()})
    else:
        is_made_up = True
        result = _by_rule(func, args)
    if is_made_up:
        run.values.note(func._schema.name.removeprefix("aten::"), is_shape=True)
    outputs = []
    for value in result if isinstance(result, tuple) else (result,):
        made = functions.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=GPU)
        run.values.set(made, value, made_up=is_made_up)
        outputs.append(made)
    return tuple(outputs) if isinstance(result, tuple) else outputs[0]


def _nonzero(run: Operators, _func: Any, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Tensor:
    """Positions, one dimension after the other (aten/src/ATen/native/cuda/Nonzero.cu)."""
    source = args[0]
    count = source.numel()
    copy = run.values.copy_of(source)
    is_made_up = copy is None or run.values.is_made_up(source)
    run.device.synchronize(run.device.stream)
    if is_made_up:
        run.values.note("nonzero", is_shape=True)
    found = (functions.ones(source.shape, dtype=torch.bool) if copy is None else copy).nonzero()
    if not count:
        return functions.empty(found.shape, dtype=torch.int64, device=GPU)
    flags_bytes = 0 if source.is_contiguous() else count * source.element_size()
    with run.device.held(flags_bytes, COUNTER_BYTES):
        run.device.touch(count_bytes(count, run.device.gpu))
        positions = functions.empty(found.shape[::-1], dtype=torch.int64, device=GPU)
        run.device.touch(select_bytes(count))
    result = positions.t()
    run.values.set(result, found, made_up=is_made_up)
    return result


def _masked_select(_run: Operators, _func: Any, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Tensor:
    """Indexing by the mask, as masked_select_out_cuda_impl has it."""
    source, mask = torch.broadcast_tensors(*args[:2])  # type: ignore[no-untyped-call]
    if source.dim() == 0:
        source, mask = source.reshape(1), mask.reshape(1)
    selected: Tensor = source[mask]
    return selected


def _by_rule(func: Any, args: Sequence[Any]) -> Any:
    source = args[0]
    if func is aten._unique2.default:
        rows = source.numel()
        return (
            functions.zeros(rows, dtype=source.dtype),
            functions.arange(rows).view(source.shape),
            functions.ones(rows).long(),
        )
    raise UnsupportedError(
        f"{place()}: the size of the result of {func} depends on values that the model computes, which a simulated GPU"
        " does not have. Run without it, or on a GPU."
    )


def _sampled(run: Operators, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A sampled token never ends a text, so that generation goes on to its longest length."""
    result = run.compute(func, args, kwargs)
    if func is aten.multinomial.default:
        _draw(args[0], args[1], replacement=args[2] if len(args) > 2 else kwargs.get("replacement", False))
    if run.values.known(result) is None and args[0].dim() > 0:
        run.values.note(f"token of {func._schema.name.removeprefix('aten::')}")
        run.values.set(result, functions.tensor(max(args[0].shape[-1] - _FROM_END, 0)), made_up=True)
    return result


def _chosen(run: Operators, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The indices of topk, by which tokens choose experts: those of the routing."""
    result = run.compute(func, args, kwargs)
    indices = result[1]
    if run.values.known(indices) is None and indices.numel():
        run.values.note("choice of topk")
        chosen = indices.shape[-1] if indices.dim() else 1
        choices = run.values.experts_of(indices.numel() // chosen, args[0].shape[-1] if args[0].dim() else 1, chosen)
        run.values.set(indices, choices.view(indices.shape), made_up=True)
    return result


def _sorted(run: Operators, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Values that are not known are in order."""
    result = run.compute(func, args, kwargs)
    indices = result[1]
    if run.values.known(indices) is None and indices.dim():
        dim = kwargs.get("dim", args[-2] if len(args) > 2 else -1)
        size = [1] * indices.dim()
        size[dim] = indices.shape[dim]
        run.values.set(indices, functions.arange(indices.shape[dim]).view(size).expand(indices.shape), made_up=True)
    return result


def _index(run: Operators, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Masks as indices become positions (TensorAdvancedIndexing's expandTensors)."""
    if func is aten._index_put_impl_.default and (mask := _filled_mask(*args)) is not None:
        return args[0].masked_fill_(mask, args[2].item())
    target, indices, *rest = args
    if any(isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8) for item in indices):
        indices = _positions(run, indices)
    if target.is_cuda:
        # make_info copies them, one after the other
        indices = [item if item is None or item.is_cuda else item.to(target.device) for item in indices]
    return run.compute(func, (target, indices, *rest), kwargs)


def _filled_mask(
    target: Tensor, indices: Sequence[Tensor | None], value: Tensor, accumulate: object = False, _unsafe: object = False
) -> Tensor | None:
    """The mask of `target[mask] = number`, which masked_fill_ takes (canDispatchToMaskedFill); None: another index."""
    found = [index for index in indices if index is not None]
    if accumulate or value.numel() != 1 or value.is_cuda or len(found) != 1:
        return None
    (mask,) = found
    if mask.dtype != torch.bool or not mask.is_cuda:
        return None
    missing = target.dim() - mask.dim() - (len(indices) - 1)
    return mask.view(*mask.shape, *(1,) * missing)


def _positions(run: Operators, indices: Sequence[Any]) -> list[Any]:
    positions: list[Any] = []
    for item in indices:
        if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8):
            found = _nonzero(run, None, (item,), {}) if item.is_cuda else item.nonzero()
            positions.extend(found.select(1, dim) for dim in range(item.dim()))
        else:
            positions.append(item)
    return positions


def _ctc_choices() -> Iterator[Any]:
    for name in ("_use_cudnn_ctc_loss", "_use_miopen_ctc_loss"):
        packet = getattr(aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            yield getattr(packet, overload)


def _padded(run: Operators, _func: Any, _args: Sequence[Any], _kwargs: Mapping[str, Any]) -> bool:
    """nn.TransformerEncoder keeps the padding, which a GPU leaves out in nested tensors without gradients."""
    run.values.note("padding in place of a nested tensor", is_shape=True)
    return False


def _gru_cell(_run: Operators, _func: Any, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Any:
    """_thnn_fused_gru_cell_cuda."""
    state = args[2]
    workspace = state.new_empty((state.shape[0], state.shape[1] * 5))
    return torch.empty_like(state, memory_format=torch.contiguous_format), workspace


def _gru_cell_backward(_run: Operators, _func: Any, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Any:
    given, workspace, has_bias = args
    shape = (workspace.shape[0], workspace.shape[1] // 5 * 3)
    of_input, of_hidden = workspace.new_empty(shape), workspace.new_empty(shape)
    of_state = torch.empty_like(given, memory_format=torch.contiguous_format)
    biases = (of_input.sum(0), of_hidden.sum(0)) if has_bias else (None, None)
    return of_input, of_hidden, of_state, *biases


def _with_number(run: Operators, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Fused optimizers whose learning rate is a tensor: the kernel reads it where it lies."""
    return run.compute(func._overloadpacket.default, args, {**kwargs, "lr": 1.0})


def _dtypes(tensors: Sequence[Tensor]) -> str:
    return " and ".join(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)


def _product(run: Operators, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Most of a model's time: in one step, as PRODUCT_INTERNALS has it for tapes.

    Raises:
        RuntimeError: dtypes differ, which torch's rules for shapes accept.
    """
    factors = args[:3] if func is aten.addmm.default else args[:2]
    if len({factor.dtype for factor in factors}) > 1:
        raise RuntimeError(f"mat1 and mat2 must have the same dtype, but got {_dtypes(factors)}")
    result = run.compute_at_once(func, args, kwargs)
    hold_workspaces(run.device, args[0] if func is aten.addmm.default else None)
    return result


RULES: dict[Any, Rule] = {
    **dict.fromkeys((aten.mm.default, aten.bmm.default, aten.addmm.default), _product),
    **_COMPARISONS,
    **_COMPOSITE_RULES,
    **CONVOLUTION_RULES,
    **_LOSS_RULES,
    **RECURRENT_RULES,
    # CTC's choice of a kernel: cuDNN's takes short targets in main memory only; its workspace is not measured
    **dict.fromkeys(_ctc_choices(), lambda *_: False),
    aten._nested_tensor_from_mask_left_aligned.default: _padded,
    aten._thnn_fused_gru_cell.default: _gru_cell,
    aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
    aten.copy_.default: _copy,
    aten._local_scalar_dense.default: _item,
    aten.equal.default: _equal,
    aten.record_stream.default: lambda run, _, args, __: run.device.use_on(storage_address(args[0]), args[1].stream_id),
    **{
        getattr(aten, name).tensor_lr: _with_number
        for name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
        if hasattr(getattr(aten, name, None), "tensor_lr")
    },
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten.multinomial.default: _sampled,
    aten.argmax.default: _sampled,
    aten.topk.default: _chosen,
    aten.sort.default: _sorted,
    aten.sort.stable: _sorted,
    **dict.fromkeys(
        (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default), _index
    ),
    **dict.fromkeys(
        (
            aten._unique2.default,
            aten.unique_dim.default,
            aten.unique_consecutive.default,
            aten.repeat_interleave.Tensor,
            aten.bincount.default,
        ),
        _found,
    ),
}
