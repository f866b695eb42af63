"""Optimizers of weights in main memory, as those of offload: the weights have no values, so none is computed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ligerprof.errors import UnsupportedError
from ligerprof.simulated_gpu.creation import functions
from ligerprof.simulated_gpu.values import place
from ligerprof.units import format_bytes

# each element of a weight and of its states follows from the same element of the gradient
_ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")


class HostUpdates:
    """Lets optimizers of elements step on one element of each such weight.

    Args:
        has_no_values: whether a tensor in main memory is a weight without values.
    """

    def __init__(self, has_no_values: Callable[[Tensor], bool]) -> None:
        self._has_no_values = has_no_values
        self._replaced: list[tuple[list[Any], int, Tensor, nn.Parameter, dict[str, Tensor]]] = []

    def install(self) -> None:
        """Watch the steps of all optimizers."""
        register_optimizer_step_pre_hook(self._before)
        register_optimizer_step_post_hook(self._after)

    def _before(self, optimizer: torch.optim.Optimizer, _arguments: Any, _named: Any) -> None:
        """Replace the weights.

        Raises:
            UnsupportedError: the optimizer may need whole weights.
        """
        found = [
            (group["params"], index, weight)
            for group in optimizer.param_groups
            for index, weight in enumerate(group["params"])
            if self._has_no_values(getattr(weight, "_local_tensor", weight))
        ]
        elementwise = tuple(getattr(torch.optim, name) for name in _ELEMENTWISE)
        if found and not isinstance(optimizer, elementwise):
            size = format_bytes(sum(weight.nbytes for _, _, weight in found))
            raise UnsupportedError(
                f"{place()}: {type(optimizer).__name__} updates {size} of weights in main memory, which have no values"
                " in a simulated run. Move them to the GPU, or run on one."
            )
        for weights, index, weight in found:
            if weight.grad is None:
                continue
            element = nn.Parameter(functions.ones(1, dtype=weight.dtype))
            element.grad = functions.ones(1, dtype=weight.grad.dtype)
            state = optimizer.state.pop(weight, {})
            whole = {key: value for key, value in state.items() if _is_like(value, weight)}
            ones = {key: functions.ones(1, dtype=value.dtype) for key, value in whole.items()}
            if state:
                optimizer.state[element] = {**state, **ones}
            weights[index] = element
            self._replaced.append((weights, index, weight, element, whole))

    def _after(self, optimizer: torch.optim.Optimizer, _arguments: Any, _named: Any) -> None:
        """Put the weights back; new states get their whole size."""
        for weights, index, weight, element, whole in self._replaced:
            weights[index] = weight
            if element in optimizer.state:
                optimizer.state[weight] = {
                    key: whole[key] if key in whole else _grown(value, element, weight)
                    for key, value in optimizer.state.pop(element).items()
                }
        self._replaced.clear()


def _is_like(value: Any, weight: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == weight.shape


def _grown(value: Any, element: Tensor, weight: Tensor) -> Any:
    return torch.empty_like(weight, dtype=value.dtype) if _is_like(value, element) else value
