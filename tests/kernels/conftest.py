"""Kernels are compiled on a GPU under `-m gpu`, and run in Triton's interpreter on the CPU otherwise."""

import functools
import inspect
import os
import warnings
from typing import Any

import pytest
import torch

# Triton reads it when a kernel is defined, so it is set before any test module imports one
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _list_builtins_once() -> None:
    """Let the interpreter list a package's builtins once, not at every call of a function: a quarter of its time.

    It replaces each builtin of triton.language for the duration of a call; the list of them never changes.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    @functools.cache
    def builtin_names(package: Any) -> tuple[str, ...]:
        return tuple(name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member))

    def patch_builtins(package: Any, builder: Any, scope: Any) -> None:
        for name in builtin_names(package):
            member = getattr(package, name)
            # already replaced when one jitted function calls another
            if tl.core.is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtins


if INTERPRETED:
    _list_builtins_once()


@pytest.fixture(autouse=True)
def cublas_is_ready(request: pytest.FixtureRequest) -> None:
    """Create the CUDA context and cuBLAS's handle on this thread before a GPU test.

    If the first cuBLAS call of a process runs on an autograd thread, torch warns that it lacks a current CUDA context.
    """
    if request.node.get_closest_marker("gpu") is not None and torch.cuda.is_available():
        ones = torch.ones(16, 16, device="cuda", requires_grad=True)
        with warnings.catch_warnings():
            # autograd's thread has a handle of its own
            warnings.filterwarnings("ignore", message=".*no current CUDA context.*")
            (ones @ ones).sum().backward()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU (in the interpreter) and the GPU (compiled), one after the other."""
    if request.param == "cpu" and not INTERPRETED:
        pytest.skip("kernels are compiled in this process; the interpreter needs TRITON_INTERPRET=1")
    torch.manual_seed(0)
    return torch.device(request.param)
