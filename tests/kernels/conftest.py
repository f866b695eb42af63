"""Kernels are compiled on a GPU under `-m gpu`, and run in Triton's interpreter on the CPU otherwise."""

import os
import warnings

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


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
