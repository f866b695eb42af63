"""Models and optimizers that have run."""

import gc
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar
from weakref import ReferenceType, WeakSet, ref

import torch
from torch import nn

from ligerprof.roles import Phase

T = TypeVar("T")


class Seen(Generic[T]):
    """A set that keeps nothing alive; the same object again and again, as in each step, costs little."""

    def __init__(self) -> None:
        self._all: WeakSet[T] = WeakSet()
        self._last: ReferenceType[T] | None = None

    def add(self, item: T) -> None:
        """Note an object."""
        if not self.is_last(item):
            self._all.add(item)
            self._last = ref(item)

    def is_last(self, item: T) -> bool:
        """Whether an object was the last to be added."""
        return self._last is not None and self._last() is item

    def __contains__(self, item: T) -> bool:
        return item in self._all

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._all))


def exists(kind: type) -> bool:
    """Whether the program has an object of a class, or of one that inherits from it."""
    kinds = {type(each) for each in gc.get_objects()}
    return any(issubclass(each, kind) for each in kinds)


def has_weights(module: nn.Module, *, trainable: bool = False) -> bool:
    """Whether a module or one inside it has weights; the first is found much faster than with `parameters()`."""
    for weight in module._parameters.values():
        if weight is not None and (weight.requires_grad or not trainable):
            return True
    # `any` with a generator takes longer
    for child in module._modules.values():  # noqa: SIM110
        if child is not None and has_weights(child, trainable=trainable):
            return True
    return False


def tensors_of(optimizers: Iterable[Any]) -> Iterator[tuple[torch.Tensor, Phase]]:
    """Gradients and states of optimizers, with the phase that allocates such tensors."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    yield weight.grad, Phase.BACKWARD
        for state in optimizer.state.values():
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    yield value, Phase.OPTIMIZER
