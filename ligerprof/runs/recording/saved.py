"""Note which autograd node saved which storage, without keeping either alive."""

import re
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from functools import cache
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from ligerprof.snapshots.stamp import SavedTensor

# a model of 100 layers saves about 3,000 tensors in a step
_MOST_ROWS = 200_000
_RAW = "_raw_saved_"
# a tensor that its own node saved: exp saves its result
_RESULT = re.compile(rf"{_RAW}(?:result|output|out)\d*$")
# a node whose output shares the storage of its input, but is not a view
_ALIAS = re.compile(r"UnsafeView|ReshapeAlias|Alias")
_END = re.compile(r"Backward\d*$")
_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=\dD)(?=[A-Z])")


def locate_on_cuda(tensor: Tensor) -> tuple[int, int] | None:
    """Device and address of a tensor's storage in CUDA memory, else None."""
    return (tensor.get_device(), address) if tensor.is_cuda and (address := storage_address(tensor)) else None


def storage_address(tensor: Tensor) -> int:
    """The address of a tensor's storage, 0 for one without elements.

    No Python object of the storage is made: from torch 2.13 on, that is a reference for as long as the storage lives,
    and autograd then no longer adds gradients in place.
    """
    address = tensor.data_ptr()
    return address - int(tensor.storage_offset()) * tensor.element_size() if address else 0


def _extent_bytes(tensor: Tensor) -> int:
    """Bytes of a storage up to a tensor's last element."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = int(tensor.storage_offset()) + sum((size - 1) * stride for size, stride in steps)
    return (last + 1) * tensor.element_size()


def unix_time_us() -> int:
    """The time by the clock that torch's allocator events have."""
    return time.time_ns() // 1000


class SavedTensors:
    """The storages that autograd nodes saved, as numbers and names; only the newest are kept.

    Reading the saved tensors of a node allocates nothing and calls no hooks: what a hook packed, as checkpointing
    and offloading do, is not a tensor of this node, and is skipped. Older versions of torch cannot show a saved tensor
    without unpacking it; there, nothing is noted.

    Args:
        locate: the device and address of a tensor's storage, None for tensors that are not recorded.
        clock: the time of events, in microseconds.
    """

    def __init__(self, *, locate: Callable[[Tensor], tuple[int, int] | None], clock: Callable[[], int]) -> None:
        self._locate, self._clock = locate, clock
        # the notes, oldest first
        self.rows: deque[SavedTensor] = deque(maxlen=_MOST_ROWS)

    def note(self, node: Node, module: str) -> None:
        """Note the tensors that a node of a module has saved."""
        for attribute, tensor in _saved_by(node):
            # weights live as long as the model
            base = _base(tensor)
            if base.is_leaf and base.requires_grad:
                continue
            try:
                size_bytes = _extent_bytes(base)
                place = self._locate(tensor) if size_bytes else None
            except (RuntimeError, NotImplementedError):
                # sparse tensors and wrappers around other tensors have no storage of their own
                continue
            if place is not None:
                operation = _operation(node if _RESULT.match(attribute) else _origin(base))
                self.rows.append(SavedTensor(self._clock(), *place, size_bytes, node.name(), module, operation))


def _saved_by(node: Any) -> Iterator[tuple[str, Tensor]]:
    """The attributes and tensors that a node saved; for a Python function, also tensors that are attributes."""
    kind: Any = type(node)
    for name in _raw_attributes(kind):
        try:
            value = getattr(node, name)
        except RuntimeError:
            # already released
            continue
        for raw in value if isinstance(value, (tuple, list)) else (value,):
            # None for an undefined tensor, and the packed object if hooks packed it
            tensor = getattr(raw, "data", None)
            if isinstance(tensor, Tensor):
                yield name, tensor
    for name, value in getattr(node, "__dict__", {}).items():
        if isinstance(value, Tensor):
            yield name, value


@cache
def _raw_attributes(kind: Hashable) -> tuple[str, ...]:
    """Of a type of node; torch generates one type for each operator."""
    return tuple(name for name in dir(kind) if name.startswith(_RAW))


def _base(tensor: Tensor) -> Tensor:
    """The tensor that a view shows, else the tensor itself."""
    base = tensor._base if tensor._is_view() else None
    return tensor if base is None else base


def _origin(base: Tensor) -> Node | None:
    """The node that computed a tensor's storage, None if autograd does not know it."""
    node = base.grad_fn
    while node is not None and _ALIAS.match(node.name()) and node.next_functions:
        node = node.next_functions[0][0]
    return node


def _operation(node: Node | None) -> str:
    """What a node is the derivative of: `silu` for SiluBackward0, and a Python function's own name."""
    # of the type: on the node, it would unpack what hooks packed
    return "" if node is None else _operation_of(node.name(), is_python=hasattr(type(node), "saved_tensors"))


@cache
def _operation_of(name: str, *, is_python: bool) -> str:
    operation = _END.sub("", name)
    return operation if is_python else _WORD.sub("_", operation).lower()
