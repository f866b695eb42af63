"""One operator call as the models of CUDA internals see it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ligerprof.runs.simulated.device import SimulatedDevice


@dataclass(slots=True)
class Call:
    """An operator that is about to run.

    Attributes:
        device: whose blocks temporaries take.
        track: gives the storages of new tensors their blocks, in order.
    """

    device: SimulatedDevice
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    track: Callable[[Any], None]

    def run_untracked(self) -> Any:
        """Run it on fake tensors; the result has no blocks yet."""
        return self.func(*self.args, **self.kwargs)

    def run(self) -> Any:
        """Run it and give the result its blocks."""
        result = self.run_untracked()
        self.track(result)
        return result

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """A schema argument, however it was passed."""
        return self.args[index] if len(self.args) > index else self.kwargs.get(name, default)


Internal = Callable[[Call], Any]


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as torch_memory names it, such as `float32`."""
    return str(dtype).removeprefix("torch.")
