"""Remember the results of operators on fake tensors: the layers of a model call the same ones with the same shapes.

torch caches fake results too, but spends most of a simulated step on the keys of its cache, which cover symbolic
shapes, sparse and quantized tensors. The keys here cover dense tensors on the CPU, which stands in for the GPU. Only a
result that torch itself took from its cache is kept, so torch decides what may be remembered.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_STAND_IN = torch.device("cpu")
# shape, strides, offset and dtype of a result, and the index of the argument whose storage a view shows
_Output = tuple[torch.Size, tuple[int, ...], int, torch.dtype, int | None]

# results follow from the key alone, so simulations share them; None for what cannot be made from it
_known: dict[Any, tuple[_Output, ...] | None] = {}


class _NotPlainError(Exception):
    """An argument has no key."""


def compute(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of an operator on fake tensors, remembered if possible."""
    try:
        key = (func, torch.get_default_dtype(), _key(args), _key(kwargs.items()) if kwargs else None)
    except _NotPlainError:
        return func(*args, **kwargs)
    if (outputs := _known.get(key)) is not None:
        mode = next(arg.fake_mode for arg in args if type(arg) is FakeTensor)
        made = [_make(output, args, mode) for output in outputs]
        return made[0] if len(made) == 1 else tuple(made)
    hits = FakeTensorMode.cache_hits
    result = func(*args, **kwargs)
    if key not in _known and FakeTensorMode.cache_hits == hits + 1:
        _known[key] = _describe(result, args)
    return result


def _key(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(_part(value) for value in values)


def _part(value: Any) -> Any:
    kind = type(value)
    if kind is FakeTensor:
        if value.constant is not None or value.fake_device != _STAND_IN:
            raise _NotPlainError
        return value.shape, value.stride(), value.storage_offset(), value.dtype, value.requires_grad
    if kind in _PLAIN:
        # True, 1 and 1.0 are equal
        return kind, value
    if kind in (list, tuple):
        return kind, _key(value)
    raise _NotPlainError


def _describe(result: Any, args: Sequence[Any]) -> tuple[_Output, ...] | None:
    """How to make the result again; None if it is more than new dense tensors and views of arguments."""
    modes = [arg.fake_mode for arg in args if type(arg) is FakeTensor]
    tensors = result if type(result) is tuple and len(result) > 1 else (result,)
    if not modes or not all(type(tensor) is FakeTensor and _is_dense(tensor) for tensor in tensors):
        return None
    storages = [arg.untyped_storage()._cdata if type(arg) is FakeTensor else None for arg in args]
    described = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        viewed = storages.index(storage._cdata) if storage._cdata in storages else None
        output = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, viewed)
        is_argument = any(tensor is arg for arg in args)
        if is_argument or _make(output, args, modes[0]).untyped_storage().nbytes() != storage.nbytes():
            return None
        described.append(output)
    return tuple(described)


def _is_dense(tensor: FakeTensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.fake_device == _STAND_IN
        and tensor.constant is None
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _make(output: _Output, args: Sequence[Any], mode: FakeTensorMode) -> Tensor:
    shape, strides, offset, dtype, viewed = output
    with torch._C._DisableTorchDispatch():
        made = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        if viewed is not None:
            made.set_(args[viewed].untyped_storage(), offset, shape, strides)
    return FakeTensor(mode, made, _STAND_IN)
