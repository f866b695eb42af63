"""What the kernels ask about the device they run on; a simulator answers for the GPU it stands for."""

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
# compute capability 9.0; where nothing is launched, no more than an answer is needed
_SHARED_BYTES = 227 * 1024
# programmatic dependent launch came with it
_HOPPER = (9, 0)

# one value for the process and not a context variable: backward may run on autograd's threads
_stand_in: list[int] = []


@contextmanager
def standing_for(*, sm_count: int) -> Iterator[None]:
    """Let every device count as one with `sm_count` multiprocessors, as a simulation of that GPU needs."""
    _stand_in.append(sm_count)
    try:
        yield
    finally:
        _stand_in.pop()


def sm_count(device: "torch.device") -> int:
    """Multiprocessors of `device`; partial sums are sized by it."""
    if _stand_in:
        return _stand_in[-1]
    if device.type == "cuda":
        return _cuda_sm_count(device.index)
    return _INTERPRETER_SM_COUNT


@cache
def _cuda_sm_count(index: int | None) -> int:
    import torch

    device = torch.cuda.current_device() if index is None else index
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def shared_bytes(device: "torch.device") -> int:
    """Shared memory that one program on `device` may use."""
    if _stand_in or device.type != "cuda":
        return _SHARED_BYTES
    return _cuda_shared_bytes(device.index)


@cache
def _cuda_shared_bytes(index: int | None) -> int:
    import torch

    device = torch.cuda.current_device() if index is None else index
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


def launches_early(device: "torch.device") -> bool:
    """Whether a launch may be made ready while the one before it runs, and its kernel waits for that one itself.

    Compiled code launches on its own terms.
    """
    import torch

    if _stand_in or device.type != "cuda" or torch.compiler.is_compiling():
        return False
    return _cuda_launches_early(device.index)


@cache
def _cuda_launches_early(index: int | None) -> bool:
    import torch

    device = torch.cuda.current_device() if index is None else index
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= _HOPPER


def on_device(tensor: "torch.Tensor") -> AbstractContextManager[object]:
    """Make the tensor's GPU the one that Triton launches on; nothing for a tensor on the CPU.

    Compiled code chooses the device itself, and torch.compile does not trace torch's guard.
    """
    import torch

    if torch.compiler.is_compiling():
        return nullcontext()
    return torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]


def graph_is_retained() -> bool:
    """Whether the backward pass that is running may run again, so that it must leave saved tensors as they are."""
    import torch

    # what torch's own compiled backward passes ask before they free or write over anything
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def is_unshared(tensor: "torch.Tensor") -> bool:
    """Whether no tensor lies on this one's memory but itself and the one that it is a view of.

    What checkpointing keeps of a recomputed or selected operation is such a tensor, and so is a result that its own
    operation keeps. One that is kept as an input is this tensor itself. In a simulation the answer is yes: fake tensors
    hold on to more of their kind than real ones do.
    """
    import torch

    if _stand_in:
        return True
    own = 1 if tensor._base is None else 2
    # what torch's own CUDA graphs ask; the question counts as one holder more
    return bool(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == own + 1)


def triton_unavailable_reason(device_kind: str) -> str | None:
    """Why a Triton kernel cannot run on a device of this kind, or None.

    Args:
        device_kind: `cuda`, `cpu` (Triton's interpreter), or `simulated` (launches left out).
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
