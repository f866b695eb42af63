"""Models and optimizers that have run."""

import gc
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar
from weakref import ReferenceType, ref

import torch
from torch import nn

from ligerprof.roles import Phase

T = TypeVar("T")


class Seen(Generic[T]):
    """A set of objects, compared by identity, that keeps nothing alive."""

    def __init__(self) -> None:
        # by id, which another object may have later
        self._all: dict[int, ReferenceType[T]] = {}

    def add(self, item: T) -> None:
        """Note an object."""
        known = self._all.get(id(item))
        if known is None or known() is not item:
            self._all[id(item)] = ref(item)

    def __contains__(self, item: T) -> bool:
        known = self._all.get(id(item))
        return known is not None and known() is item

    def __iter__(self) -> Iterator[T]:
        return iter([item for known in list(self._all.values()) if (item := known()) is not None])


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
