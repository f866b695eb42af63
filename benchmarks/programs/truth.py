"""The register of programs, and the truth: what each storage of a program holds."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

# a simulation runs the programs on tensors that look like the CPU's
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# name to function and options: `stacks` and `context` of the recording, `late`, `limit_mib`, `ranks`, `vocabulary`
PROGRAMS: dict[str, tuple[Callable[[], None], dict[str, Any]]] = {}


def program(**options: Any) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a program under its name."""

    def keep(function: Callable[[], None]) -> Callable[[], None]:
        PROGRAMS[function.__name__.replace("_", "-")] = (function, options)
        return function

    return keep


def local(tensor: Any) -> Any:
    """The part of a sharded tensor that this rank has."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def states_of(optimizer: Any) -> list[torch.Tensor]:
    """The states of an optimizer that are tensors."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    listed = [each for value in values for each in (value if isinstance(value, (list, tuple)) else [value])]
    return [value for value in listed if isinstance(value, torch.Tensor)]


class Truth:
    """Where named tensors are, and after which allocation they were there."""

    def __init__(self) -> None:
        self.tags: list[tuple[int, int, int, str, str]] = []
        self.getters: dict[str, list[Callable[[], Iterable[Any]]]] = {}

    def tag(self, tensor: Any, role: str, name: str = "") -> None:
        """Note that a tensor has a role at this moment."""
        tensor = local(tensor)
        address = None if tensor is None else self.address(tensor)
        if address is not None:
            self.tags.append((self.allocations(), address, tensor.untyped_storage().nbytes(), role, name))

    def address(self, tensor: torch.Tensor) -> int | None:
        """The address of a tensor's storage on the GPU, None elsewhere."""
        return tensor.untyped_storage().data_ptr() if tensor.is_cuda else None

    def allocations(self) -> int:
        """The number of allocations so far."""
        return int(torch.cuda.memory_stats()["allocation.all.allocated"])

    def step(self, model: torch.nn.Module, optimizer: Any) -> None:
        """Note gradients, step the optimizer and drop the gradients."""
        for name, weight in model.named_parameters():
            if weight.grad is not None and not weight.grad.is_sparse:
                self.tag(weight.grad, "gradients", name)
        optimizer.step()
        optimizer.zero_grad()

    def live(self, role: str, getter: Callable[[], Iterable[Any]]) -> None:
        """Read the tensors of a role when the recording is taken."""
        self.getters.setdefault(role, []).append(getter)

    def model(self, model: torch.nn.Module) -> None:
        """The parameters, buffers and gradients of a model."""
        self.live("parameters", lambda: list(model.parameters()))
        self.live("buffers", lambda: list(model.buffers()))
        self.live("gradients", lambda: [p.grad for p in model.parameters() if p.grad is not None])

    def optimizer(self, optimizer: Any) -> None:
        """The states of an optimizer."""
        self.live("optimizer_states", lambda: states_of(optimizer))

    def read(self) -> dict[str, Any]:
        """The storages that are alive now, each once, and the tags."""
        blocks, bytes_by_role, seen = [], {}, set()
        for role, getters in self.getters.items():
            total_bytes = 0
            for tensor in (local(each) for getter in getters for each in getter()):
                if not isinstance(tensor, torch.Tensor) or tensor.is_sparse:
                    continue
                address, size_bytes = self.address(tensor), tensor.untyped_storage().nbytes()
                if address is None or address in seen or not size_bytes:
                    continue
                seen.add(address)
                blocks.append((address, size_bytes, role))
                total_bytes += size_bytes
            bytes_by_role[role] = total_bytes
        return {"live_bytes": bytes_by_role, "live": blocks, "tags": self.tags}


TRUTH = Truth()
