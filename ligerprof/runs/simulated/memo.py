"""Remember the results of operators on fake tensors: the layers of a model call the same ones with the same shapes.

torch caches fake results too, but spends most of a simulated step on the keys of its cache, which cover symbolic
shapes, sparse and quantized tensors. The keys here cover dense tensors on the CPU, which stands in for the GPU. Only a
result that torch itself keeps in its cache is kept, so torch decides what may be remembered.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import _get_dispatch_mode, _TorchDispatchModeKey
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
_STAND_IN = torch.device("cpu")
_META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class _Argument:
    """A result that is the argument at an index, as in-place operators return it."""

    index: int


# shape, strides, offset and dtype of a new tensor, and the index of the argument whose storage a view shows
_New = tuple[torch.Size, tuple[int, ...], Any, torch.dtype, int | None]
_Output = _New | _Argument | int | None

# results follow from the key alone, so simulations share them; None for what cannot be made from it
_known: dict[Any, tuple[_Output, ...] | None] = {}
# attributes of a fake tensor that torch made, except its mode
_attributes: dict[str, Any] = {}


class _NotPlainError(Exception):
    """An argument has no key."""


def compute(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of an operator on fake tensors, remembered if possible."""
    try:
        key = (func, torch.get_default_dtype(), _key(args), _key(kwargs.items()) if kwargs else None)
    except _NotPlainError:
        return func(*args, **kwargs)
    if (outputs := _known.get(key)) is not None:
        mode = _get_dispatch_mode(_TorchDispatchModeKey.FAKE)
        if len(outputs) == 1:
            return _make(outputs[0], args, mode)
        return tuple([_make(output, args, mode) for output in outputs])
    if key in _known:
        return func(*args, **kwargs)
    hits, misses, bypasses = _cache_counts()
    result = func(*args, **kwargs)
    hits_now, misses_now, bypasses_now = _cache_counts()
    # taken from torch's cache, in one piece, or put into it
    if hits_now == hits + 1 or (misses_now > misses and bypasses_now == bypasses):
        _known[key] = _describe(result, args)
    return result


def _cache_counts() -> tuple[int, int, int]:
    """How many results torch has taken from its cache, put into it, and kept out of it."""
    return FakeTensorMode.cache_hits, FakeTensorMode.cache_misses, sum(FakeTensorMode.cache_bypasses.values())


def _key(values: Iterable[Any]) -> tuple[Any, ...]:
    parts: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.fake_device != _STAND_IN:
                raise _NotPlainError
            parts.append((value.shape, value.stride(), value.storage_offset(), value.dtype, value.requires_grad))
        elif kind in _PLAIN:
            # True, 1 and 1.0 are equal
            parts.append((kind, value))
        elif kind is list or kind is tuple:
            parts.append((kind, _key(value)))
        else:
            raise _NotPlainError
    return tuple(parts)


def _describe(result: Any, args: Sequence[Any]) -> tuple[_Output, ...] | None:
    """How to make the result again; None if it is more than arguments, numbers, new dense tensors and views."""
    outputs = result if type(result) is tuple and len(result) > 1 else (result,)
    storages = [_storage_key(arg) for arg in args]
    listed = {_storage_key(item) for arg in args if type(arg) in (list, tuple) for item in arg} - {None}
    described: list[_Output] = []
    for output in outputs:
        if type(output) is int or output is None:
            described.append(output)
            continue
        if type(output) is not FakeTensor or not _is_dense(output):
            return None
        index = next((index for index, arg in enumerate(args) if output is arg), None)
        if index is not None:
            described.append(_Argument(index))
            continue
        if output.requires_grad:
            return None
        storage = output.untyped_storage()
        viewed = storages.index(storage._cdata) if storage._cdata in storages else None
        new = (output.shape, output.stride(), output.storage_offset(), output.dtype, viewed)
        made = _make(new, args, output.fake_mode)
        if storage._cdata in listed or made.untyped_storage().nbytes() != storage.nbytes():
            return None
        described.append(new)
    return tuple(described)


def _storage_key(value: Any) -> int | None:
    return value.untyped_storage()._cdata if type(value) is FakeTensor else None


def _is_dense(tensor: FakeTensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.fake_device == _STAND_IN
        and tensor.constant is None
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _make(output: _Output, args: Sequence[Any], mode: FakeTensorMode) -> Any:
    if type(output) is _Argument:
        return args[output.index]
    if type(output) is not tuple:
        return output
    shape, strides, offset, dtype, viewed = output
    with torch._C._DisableTorchDispatch():
        made = torch.empty_strided(shape, strides, dtype=dtype, device=_META)
        if viewed is not None:
            made.set_(args[viewed].untyped_storage(), offset, shape, strides)
    return _fake(made, mode)


def _fake(made: Tensor, mode: FakeTensorMode) -> Any:
    """FakeTensor(mode, made, _STAND_IN), whose constructor takes several times as long."""
    if not _attributes:
        _attributes.update(vars(FakeTensor(mode, made, _STAND_IN)))
        del _attributes["fake_mode"]
    fake: Any = Tensor._make_subclass(FakeTensor, made, dispatch_device=True, device_for_backend_keys=_STAND_IN)
    torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
    vars(fake).update(_attributes)
    fake.fake_mode = mode
    return fake
