"""Where kernels run in tests: compiled on a GPU under `-m gpu`, else in Triton's interpreter on the CPU."""

import os

import pytest
import torch

# read when a kernel is defined, so it must stand before any test module imports one
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each test body runs on the interpreter here and compiled there."""
    if request.param == "cpu" and not INTERPRETED:
        pytest.skip("kernels are compiled in this process; the interpreter needs TRITON_INTERPRET=1")
    torch.manual_seed(0)
    return torch.device(request.param)
