"""What an operator returns for tensors of these shapes: computed by torch's fake tensors once, then remembered."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)

# torch's functions that make tensors; packages replace those in the module torch, and not what CUDA's kernels call
if TYPE_CHECKING:
    functions = torch
else:
    functions = torch._C._VariableFunctions
# without an index: this process's own
GPU = torch.device("cuda")
_META = torch.device("meta")
_PLAIN = frozenset({int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
_NUMBERS = frozenset({int, bool, float, complex})
# elements among the arguments of an operator that runs in main memory for the shapes of its result
_MOST_ON_HOST = 1 << 24
# operators whose float arguments decide about shapes
_BY_FLOAT = ("arange", "range", "linspace", "logspace", "upsample", "_upsample", "dropout", "native_dropout")
# fake tensors look at the devices of its indices
_BY_DEVICE = frozenset({torch.ops.aten.index.Tensor})
# keys that select a cast of autocast, or the graph of autograd, neither of which a kernel sees
_ABOVE = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCPU
)


class New(NamedTuple):
    """A new tensor; `size_bytes` of its storage where more than the tensor needs."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    on_gpu: bool
    offset: int = 0
    size_bytes: int | None = None


class View(NamedTuple):
    """A view of the argument at an index among the tensors; the offset is relative to the argument's."""

    position: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int


class Argument(NamedTuple):
    """The argument at an index among the tensors, as in-place operators return it."""

    position: int


class Plan(NamedTuple):
    """How to make the result of an operator.

    Attributes:
        outputs: New, View, Argument, a constant, or a list or tuple of these.
        resized: tensors among the arguments, by index, that have another shape afterwards.
        elements: elements of the largest new tensor of integers or bools, and of the largest one of floats.
    """

    outputs: Any
    resized: tuple[tuple[int, torch.Size, tuple[int, ...]], ...]
    elements: tuple[int, int]


class NotPlainError(Exception):
    """An argument has no key."""


class _Mode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors that ask for nothing on the GPU, which is the program's."""

    avoid_device_init = True


class Planner:
    """Plans results; `plan` is remembered by operator, shapes and arguments."""

    def __init__(self) -> None:
        self._known: dict[Any, Plan] = {}

    @cached_property
    def _mode(self) -> FakeTensorMode:
        # an operator that fails raises to its caller, who may expect that; torch would print its traceback as well
        logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
        # imports torch's compiler
        return _Mode(allow_fallback_kernels=False, allow_non_fake_inputs=True)

    def plan(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: list[Tensor]) -> Plan:
        """The plan of a call.

        Args:
            tensors: receives all tensors among the arguments, in order.

        Raises:
            torch's errors for arguments that the operator does not take.
        """
        parts: list[Any] = [func, torch.get_default_dtype()]
        by_float = func._schema.name[6:].startswith(_BY_FLOAT)
        try:
            _collect(args, parts, tensors, by_float=by_float)
            if kwargs:
                for name, value in kwargs.items():
                    parts.append(name)
                    _collect((value,), parts, tensors, by_float=by_float)
        except NotPlainError:
            del tensors[:]
            _collect((args, tuple(kwargs.values())), None, tensors, by_float=False)
            return self._compute(func, args, kwargs, tensors)
        key = tuple(parts)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._compute(func, args, kwargs, tensors)
        return found

    def _compute(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]) -> Plan:
        with torch._C._ExcludeDispatchKeyGuard(_ABOVE), torch._C.DisableTorchFunction():
            on_meta = _runs_on_meta(func) and _is_on_gpu(tensors, args, kwargs)
            fakes = [_meta(tensor) if on_meta else self._fake(tensor) for tensor in tensors]
            before = [(fake.shape, fake.stride()) for fake in fakes]
            try:
                with nullcontext() if on_meta else self._mode:
                    result = _called(func, args, kwargs, fakes)
            except (UnsupportedOperatorException, DynamicOutputShapeException, NotImplementedError):
                return self._compute_on_host(func, args, kwargs, tensors)
        resized = _resized(fakes, before)
        storages = {fake.untyped_storage()._cdata: index for index, fake in reversed(list(enumerate(fakes)))}
        most = [0, 0]
        outputs = self._described(result, fakes, storages, most)
        return Plan(outputs, resized, (most[0], most[1]))

    def _compute_on_host(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Any) -> Plan:
        """Run an operator whose shapes torch has no rule for in main memory, on zeros.

        Raises:
            NotImplementedError: there is no such kernel, or too much to compute.
        """
        if sum(tensor.numel() for tensor in tensors) > _MOST_ON_HOST:
            raise NotImplementedError
        zeros = [functions.zeros(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
        before = [(zero.shape, zero.stride()) for zero in zeros]
        result = _called(func, args, kwargs, zeros)
        most = [0, 0]
        outputs = self._described(result, zeros, {}, most)
        return Plan(_on_gpu(outputs), _resized(zeros, before), (most[0], most[1]))

    def _fake(self, tensor: Tensor) -> Tensor:
        return FakeTensor(self._mode, _meta(tensor), tensor.device if tensor.is_cuda else torch.device("cpu"))

    def _described(self, value: Any, fakes: Sequence[Tensor], storages: Mapping[int, int], most: list[int]) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)([self._described(item, fakes, storages, most) for item in value])
        if not isinstance(value, Tensor):
            return value
        index = next((index for index, fake in enumerate(fakes) if fake is value), None)
        if index is not None:
            return Argument(index)
        shape, strides, offset, dtype = value.shape, value.stride(), int(value.storage_offset()), value.dtype
        storage = value.untyped_storage()
        viewed = storages.get(storage._cdata)
        if viewed is not None:
            return View(viewed, shape, strides, dtype, offset)
        floats = dtype.is_floating_point or dtype.is_complex
        most[floats] = max(most[floats], value.numel())
        needed = 0
        if value.numel():
            last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
            needed = int(last + 1) * dtype.itemsize
        size_bytes = int(storage.nbytes())
        exact = size_bytes == needed and offset == 0
        device = value.fake_device if isinstance(value, FakeTensor) else value.device
        on_gpu = device.type != "cpu"
        return New(shape, strides, dtype, on_gpu, offset, None if exact else size_bytes)


@cache
def _runs_on_meta(func: Any) -> bool:
    """Whether fake tensors would only call the operator on the meta device, in ten times the time."""
    special: Any = fake_impls
    return (
        func.namespace == "aten"
        and not (func not in _BY_DEVICE and any(check(func) for check, _ in special.op_implementations_checks))
        and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "Meta")
    )


def _is_on_gpu(tensors: Sequence[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    given = (*args, *kwargs.values())
    return all(tensor.is_cuda for tensor in tensors) and not any(type(value) is torch.device for value in given)


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)


def callable_for(func: Any, args: Sequence[Any]) -> Any:
    """The overload of an operator that takes numbers where this one, called from C++, takes them as tensors."""
    arguments = zip(func._schema.arguments, args, strict=False)
    if any(type(value) in _NUMBERS and isinstance(argument.type, torch.TensorType) for argument, value in arguments):
        return func.overloadpacket
    return func


def _resized(tensors: Sequence[Tensor], before: Sequence[Any]) -> tuple[tuple[int, torch.Size, tuple[int, ...]], ...]:
    return tuple(
        (index, tensor.shape, tensor.stride())
        for index, (tensor, old) in enumerate(zip(tensors, before, strict=True))
        if (tensor.shape, tensor.stride()) != old
    )


def _on_gpu(output: Any) -> Any:
    if type(output) is New:
        return output._replace(on_gpu=True)
    if isinstance(output, (list, tuple)) and type(output) is not Argument:
        return type(output)([_on_gpu(item) for item in output])
    return output


def make(output: New, *, on_meta: bool = False) -> Tensor:
    """A new tensor; on the meta device to allocate it later."""
    shape, strides, dtype, on_gpu, offset, size_bytes = output
    device = _META if on_meta else GPU if on_gpu else torch.device("cpu")
    if size_bytes is None:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)
    elements = size_bytes // dtype.itemsize
    return functions.empty(elements, dtype=dtype, device=device).as_strided(shape, strides, offset)


def realized(plan: Plan, tensors: Sequence[Tensor], *, on_meta: bool = False) -> Any:
    """The result of an operator, with new tensors."""
    for index, shape, strides in plan.resized:
        tensor = tensors[index]
        tensor.resize_(shape)
        if tensor.stride() != strides:
            tensor.as_strided_(shape, strides)
    return _realized(plan.outputs, tensors, on_meta)


def _realized(output: Any, tensors: Sequence[Tensor], on_meta: bool) -> Any:
    kind = type(output)
    if kind is New:
        return make(output, on_meta=on_meta)
    if kind is Argument:
        return tensors[output.position]
    if kind is View:
        seen = tensors[output.position]
        offset = int(seen.storage_offset()) + output.offset
        if output.dtype != seen.dtype:
            seen = seen.view(output.dtype)
        return seen.as_strided(output.shape, output.strides, offset)
    if isinstance(output, (list, tuple)):
        return kind([_realized(item, tensors, on_meta) for item in output])
    return output


def _collect(values: Iterable[Any], parts: list[Any] | None, tensors: list[Tensor], *, by_float: bool) -> None:
    """Append the tensors among the values, and a key of the values to `parts` unless that is None."""
    for value in values:
        kind = type(value)
        if isinstance(value, Tensor):
            tensors.append(value)
            if parts is not None:
                parts.append((value.shape, value.stride(), value.dtype, value.is_cuda))
        elif kind is list or kind is tuple:
            if parts is not None:
                parts.append(len(value))
            _collect(value, parts, tensors, by_float=by_float)
        elif parts is None:
            continue
        elif kind is float:
            # most floats change from step to step, and decide about no shape
            parts.append(value if by_float else (value == 0.0, float))
        elif kind in _PLAIN:
            # True and 1 are equal
            parts.append((kind, value))
        elif kind is torch.Generator:
            parts.append(kind)
        else:
            raise NotPlainError


def _called(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Iterable[Tensor]) -> Any:
    """What an operator returns for other tensors in the places of those among its arguments."""
    waiting = iter(tensors)
    given = _replaced(args, waiting)
    return callable_for(func, args)(*given, **{name: _replaced(value, waiting) for name, value in kwargs.items()})


def _replaced(value: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(value, Tensor):
        return next(tensors)
    if type(value) in (list, tuple):
        return type(value)([_replaced(item, tensors) for item in value])
    return None if isinstance(value, torch.Generator) else value
