"""Properties of the device that kernels run on; in a simulation, those of the simulated GPU."""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DEVICE_KINDS = ("cuda", "cpu", "simulated")

# Triton's interpreter runs programs one after the other; a few are enough to exercise partial sums
_INTERPRETER_SM_COUNT = 4
# of compute capability 9.0, if nothing is launched
_SHARED_BYTES = 227 * 1024
# the first major compute capability with programmatic dependent launch and fetches into the L2 cache
_HOPPER = 9

# entered once per launch: torch's guard takes microseconds, also where it changes nothing
_NO_CHANGE = nullcontext()

# multiprocessors of the simulated GPUs, innermost last; not a context variable, because backward may run on autograd's
# own threads
_simulated_sm_counts: list[int] = []


@contextmanager
def simulated_device(*, sm_count: int) -> Iterator[None]:
    """Treat every device as a GPU with `sm_count` multiprocessors."""
    _simulated_sm_counts.append(sm_count)
    try:
        yield
    finally:
        _simulated_sm_counts.pop()


def is_simulated() -> bool:
    """Whether a GPU is being simulated."""
    return bool(_simulated_sm_counts)


def sm_count(device: "torch.device") -> int:
    """Multiprocessors of `device`, which determine the number of partial sums."""
    if _simulated_sm_counts:
        return _simulated_sm_counts[-1]
    return _cuda_facts(device.index)[0] if device.type == "cuda" else _INTERPRETER_SM_COUNT


def shared_bytes(device: "torch.device") -> int:
    """Shared memory available to one program on `device`."""
    if is_simulated() or device.type != "cuda":
        return _SHARED_BYTES
    return _cuda_facts(device.index)[1]


def launches_early(device: "torch.device") -> bool:
    """Whether a launch may start before the previous one has finished; its kernel then waits for the results.

    False in compiled code, which launches kernels itself.
    """
    import torch

    return not (is_simulated() or torch.compiler.is_compiling()) and is_hopper(device)


def is_hopper(device: "torch.device") -> bool:
    """Whether `device` is an NVIDIA GPU of compute capability 9.0 or later."""
    import torch

    return device.type == "cuda" and torch.version.cuda is not None and _cuda_facts(device.index)[2] >= _HOPPER


@cache
def _cuda_facts(index: int | None) -> tuple[int, int, int]:
    """Multiprocessors, bytes of shared memory per program, and major compute capability; None is the current GPU."""
    import torch

    gpu = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    return int(gpu.multi_processor_count), int(gpu.shared_memory_per_block_optin), int(gpu.major)  # type: ignore[attr-defined]


def on_device(tensor: "torch.Tensor") -> AbstractContextManager[object]:
    """Make the tensor's GPU the current one, on which Triton launches; no effect for a tensor on the CPU.

    Compiled code selects the device itself, and torch.compile does not trace torch's guard.
    """
    import torch

    if torch.compiler.is_compiling():
        return nullcontext()
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return _NO_CHANGE
    return torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]


def triton_unavailable_reason(device_kind: str) -> str | None:
    """Why Triton kernels cannot run on `cuda`, `cpu` (Triton's interpreter) or `simulated` (no launches), or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (on Linux: pip install triton)"
    if device_kind == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "Triton kernels run on a CPU only in its interpreter: set TRITON_INTERPRET=1 before starting"
    if device_kind != "cuda":
        return None
    import torch

    return None if torch.cuda.is_available() else "no CUDA device is visible to torch"
