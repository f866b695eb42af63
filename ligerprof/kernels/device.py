"""What the kernels ask about the device they run on; in a simulation the answers are those of the simulated GPU."""

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
# of compute capability 9.0, where nothing is launched and any plausible answer will do
_SHARED_BYTES = 227 * 1024
# the first compute capability with programmatic dependent launch
_HOPPER = (9, 0)

# multiprocessors of the simulated GPUs, innermost last. A plain list and not a context variable, because backward may
# run on autograd's own threads
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
    if device.type == "cuda":
        return _cuda_sm_count(device.index)
    return _INTERPRETER_SM_COUNT


@cache
def _cuda_sm_count(index: int | None) -> int:
    import torch

    device = torch.cuda.current_device() if index is None else index
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def shared_bytes(device: "torch.device") -> int:
    """Shared memory available to one program on `device`."""
    if is_simulated() or device.type != "cuda":
        return _SHARED_BYTES
    return _cuda_shared_bytes(device.index)


@cache
def _cuda_shared_bytes(index: int | None) -> int:
    import torch

    device = torch.cuda.current_device() if index is None else index
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


def launches_early(device: "torch.device") -> bool:
    """Whether a launch may start before the previous one has finished, its kernel waiting for the results.

    Never in compiled code, which launches on its own terms.
    """
    import torch

    if is_simulated() or device.type != "cuda" or torch.compiler.is_compiling():
        return False
    return _cuda_launches_early(device.index)


@cache
def _cuda_launches_early(index: int | None) -> bool:
    import torch

    device = torch.cuda.current_device() if index is None else index
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= _HOPPER


def on_device(tensor: "torch.Tensor") -> AbstractContextManager[object]:
    """Make the tensor's GPU the current one, on which Triton launches; no effect for a tensor on the CPU.

    Compiled code selects the device itself, and torch.compile does not trace torch's guard.
    """
    import torch

    if torch.compiler.is_compiling():
        return nullcontext()
    return torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]


def triton_unavailable_reason(device_kind: str) -> str | None:
    """Why a Triton kernel cannot run on a device of this kind, or None.

    Args:
        device_kind: `cuda`, `cpu` (Triton's interpreter), or `simulated` (nothing is launched).
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (there is one for Linux: pip install triton)"
    if device_kind == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "Triton kernels run on a CPU only in its interpreter: set TRITON_INTERPRET=1 before starting"
    return _no_cuda_reason() if device_kind == "cuda" else None


def _no_cuda_reason() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "no CUDA device is visible to torch"


def never_unavailable(device_kind: str) -> str | None:  # noqa: ARG001
    """Plain torch runs everywhere."""
    return None
