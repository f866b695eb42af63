"""What all tests share: how hypothesis searches, and that GPU tests want a GPU."""

import os

import pytest
from hypothesis import settings

# no deadline: a shared machine is slow now and then. In CI the same examples every time.
settings.register_profile("ligerprof", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("ligerprof")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `gpu` that was asked for where there is no CUDA device."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
