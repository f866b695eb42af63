"""One operator call, as the models of CUDA internals receive it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ligerprof.simulated_gpu.device import Device
from ligerprof.torch_memory.dtypes import Scratch, dtype_name

__all__ = ["Call", "Internal", "dtype_name"]


@dataclass(slots=True)
class Call:
    """An operator that is about to run.

    Attributes:
        device: allocates the temporaries.
        track: allocates blocks for the storages of new tensors, in order.
        planned: makes the operator's results, on the GPU or, with `on_meta`, without blocks.
    """

    device: Device
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    track: Callable[[Any], None]
    planned: Callable[..., Any]

    def run(self) -> Any:
        """Run the operator and allocate blocks for its result."""
        return self.planned(on_meta=False)

    def run_untracked(self) -> Any:
        """Run the operator without allocating blocks for its result."""
        return self.planned(on_meta=True)

    def run_with_scratch(self, scratch: Callable[[Any], Scratch]) -> Any:
        """Run the operator, then allocate and free the scratch blocks that follow from its result."""
        result = self.run()
        self.device.run_scratch(scratch(result))
        return result

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """An argument of the schema, passed by position or by name."""
        return self.args[index] if len(self.args) > index else self.kwargs.get(name, default)


Internal = Callable[[Call], Any]
