"""Count the work of steps that run on the simulated GPU: every operator, with its shapes and dtypes."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ligerprof.analyzers.step_time.rates import Host, Kind, Ledger, Part, Work, product, step_time
from ligerprof.simulated_gpu import patches
from ligerprof.simulated_gpu.machine import Machine
from ligerprof.simulated_gpu.values import tensors_in

aten = torch.ops.aten
_NAMES = {torch.bfloat16: "bf16", torch.float16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
# the operands of products among the arguments, by operator
_PRODUCTS = {
    aten.mm: (0, 1),
    aten.bmm: (0, 1),
    aten.addmm: (1, 2),
    aten.baddbmm: (1, 2),
    aten._addmm_activation: (1, 2),
}
_ATTENTION = ("flash", "cudnn", "efficient")
_OVERWRITES = ("copy_", "fill_", "zero_", "_copy_from")
_NO_KERNEL = ("record_stream", "set_", "detach", "alias", "_local_scalar_dense", "_unsafe_view")
_WORDS = {
    "gather": ("embedding", "index", "gather", "scatter"),
    "softmax": ("softmax", "nll", "cross_entropy"),
    "norm": ("layer_norm", "group_norm", "rms_norm"),
    "reduce": ("sum", "mean", "norm", "max", "min", "logsumexp"),
}


class OperatorCounter(ABC):
    """Counts operators and launches of the simulated GPU; `ledger`: what is counted now, or None."""

    ledger: Ledger | None = None

    @abstractmethod
    def part(self) -> Part:
        """The part of the step that runs."""

    def install(self, machine: Machine) -> None:
        machine.operators.ran = self._ran
        patches.launch_observers.append(self._launched)

    def _ran(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        if self.ledger is None or func._schema.name.removeprefix("aten::") in _NO_KERNEL:
            return
        part = self.part()
        host = {Part.OPTIMIZER: Host.OPTIMIZER, Part.BACKWARD: Host.BACKWARD}.get(part, Host.OPERATOR)
        if part is Part.LOSS and not torch.is_grad_enabled():
            host = Host.BACKWARD
        is_product = func.overloadpacket in _PRODUCTS
        self.ledger.add(part, _product(func, args) if is_product else _other(func, args, kwargs, result), host)

    def _launched(self, arguments: Sequence[Any]) -> None:
        """A kernel of Triton's reads or writes each of its tensors."""
        if self.ledger is not None:
            moved_bytes = sum(map(_bytes_of, _distinct(tensors_in(arguments))))
            self.ledger.add(self.part(), Work(Kind.MEMORY, "triton", moved_bytes), Host.TRITON)


class ProgramCounter(OperatorCounter):
    """Counts the steps of any program: a step ends with that of the first optimizer.

    Attributes:
        last: the work of the last step that ended, or None.
    """

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.last: Ledger | None = None
        self._updates = 0
        self._first: int | None = None
        register_optimizer_step_pre_hook(self._begin_update)
        register_optimizer_step_post_hook(self._end_update)

    def install(self, machine: Machine) -> None:
        """Count from now on; the machine's summary has the time of the last step."""
        super().install(machine)
        machine.step_time = lambda: self._time(machine.device.gpu.name)

    def _time(self, gpu: str) -> dict[str, Any]:
        time = None if self.last is None else step_time(self.last, gpu, 0)
        return {} if time is None else {"step_seconds": time.seconds, "time_bound": time.bound.value}

    def _begin_update(self, optimizer: Any, *_arguments: Any) -> None:
        self._first = id(optimizer) if self._first is None else self._first
        self._updates += 1

    def _end_update(self, optimizer: Any, *_arguments: Any) -> None:
        self._updates -= 1
        if id(optimizer) == self._first:
            self.last, self.ledger = self.ledger, Ledger()

    def part(self) -> Part:
        """The part of the step that runs; the loss is part of both passes."""
        if self._updates:
            return Part.OPTIMIZER
        return Part.FORWARD if torch._C._current_graph_task_id() < 0 else _backward_part()


def _backward_part() -> Part:
    return Part.RECOMPUTE if torch.is_grad_enabled() or _is_recomputing() else Part.BACKWARD


def _is_recomputing() -> bool:
    """Whether a function that autograd does not record runs in a layer that checkpointing runs again."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_name != "recompute_fn":
        frame = frame.f_back
    return frame.f_back is not None


def _product(func: Any, args: Sequence[Any]) -> Work:
    first, second = _PRODUCTS[func.overloadpacket]
    left, right = args[first], args[second]
    *batch, m, k = left.shape
    return product(_dtype(left), prod(batch), m, right.shape[-1], k, left.element_size())


def _dtype(tensor: Tensor) -> str:
    name = _NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
    return "tf32" if name == "fp32" and torch.backends.cuda.matmul.allow_tf32 else name


def _other(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Work | None:
    name = func._schema.name.removeprefix("aten::")
    if name.startswith("_scaled_dot_product") and (kernel := next((k for k in _ATTENTION if k in name), None)):
        return _attention(name, kernel, args)
    if name == "_grouped_mm":
        left, right = args[0], args[1]
        groups = right.shape[0] if right.dim() == 3 else result.shape[0]
        m, n = (left.shape[0] // groups, right.shape[-1]) if right.dim() == 3 else (left.shape[-2], right.shape[-1])
        k = left.shape[-1] if right.dim() == 3 else left.shape[-1] // groups
        return product(_dtype(left), groups, m, n, k, left.element_size())
    given = list(tensors_in((args, tuple(kwargs.values()))))
    on_host = [tensor for tensor in given if not tensor.is_cuda and tensor.dim()]
    if on_host and name in _OVERWRITES:
        return Work(Kind.TRANSFER, "to-gpu" if args[0].is_cuda else "to-host", _bytes_of(args[0]))
    read = given[1:] if name in _OVERWRITES else given
    written = [
        tensor
        for argument, value in zip(func._schema.arguments, args, strict=False)
        # gradients are written only where a scaler has scaled them
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name != "grads"
        for tensor in tensors_in(value)
    ] or list(tensors_in(result))
    if name == "embedding":
        # the rows of the result, of a table
        read = written
    moved_bytes = sum(map(_bytes_of, _distinct(read))) + sum(map(_bytes_of, written))
    return Work(Kind.MEMORY, _way(name, given, written), moved_bytes)


def _attention(name: str, kernel: str, args: Sequence[Any]) -> Work:
    is_backward = "backward" in name
    query, key = args[1:3] if is_backward else args[:2]
    batch, heads, queries, width = query.shape
    # in forward after the mask, the statistics and the dropout; in backward the last flag
    causal = [value for value in args if isinstance(value, bool)][-1:]
    shape = (batch, heads, queries, key.shape[-2], width)
    return Work(Kind.ATTENTION, kernel, 0, shape, bool(causal and causal[0]), is_backward)


def _way(name: str, given: Sequence[Tensor], written: Sequence[Tensor]) -> str:
    """How torch's kernel moves bytes, by which its rate is known."""
    if (way := next((way for way, words in _WORDS.items() if any(word in name for word in words)), None)) is not None:
        return "pointwise" if name.startswith("_foreach") else way
    if name.startswith("_fused") and written:
        return f"fused {_NAMES.get(written[0].dtype)}"
    out = written[0] if written else None
    read = given[1:] if name in _OVERWRITES else given
    if out is None or not read or name.startswith("_foreach"):
        return "pointwise"
    if name in _OVERWRITES and read[0].shape == out.shape and read[0].stride() != out.stride():
        return "copy"
    if any(1 < _bytes_of(tensor) // tensor.element_size() < out.numel() for tensor in read):
        return "broadcast"
    return "upcast" if out.element_size() > read[0].element_size() else "pointwise"


def _bytes_of(tensor: Tensor) -> int:
    """Bytes of memory that a tensor shows: an expanded axis is read once."""
    return tensor.element_size() * prod(
        size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or size == 0
    )


def _distinct(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    seen = set()
    for tensor in tensors:
        key = (tensor.data_ptr() if tensor.is_cuda else id(tensor), tensor.shape)
        if key not in seen:
            seen.add(key)
            yield tensor
