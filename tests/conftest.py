"""What all tests share: where Triton runs, how hypothesis searches, and that GPU tests want a GPU."""

import os

import pytest
import torch
from hypothesis import settings

# Triton reads it when it is first imported, by whichever test comes first; transformers imports Triton, too
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# no deadline: a shared machine is slow now and then. In CI the same examples every time.
settings.register_profile("ligerprof", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("ligerprof")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `gpu` that was asked for where there is no CUDA device."""
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
