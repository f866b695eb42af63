"""What all tests share: where Triton runs, how hypothesis searches, and that GPU tests want a GPU."""

import gc
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext

# before torch reads it: two workers on two cores run no faster with two threads each, and take more of both;
# and ranks that are forked after OpenMP has started threads hang
os.environ["OMP_NUM_THREADS"] = "1"

# reports that are not on a terminal are as wide as it says
os.environ.pop("COLUMNS", None)

import pytest
import torch
from hypothesis import settings

from ligerprof.runs.sweep import runner as session
from ligerprof.runs.sweep.starting import CellStarter
from tests import durations, estimated, interpreter, recorded

# Triton reads it when it is first imported, by whichever test comes first; transformers imports Triton, too
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("TRITON_INTERPRET") == "1":
    interpreter.speed_up()

estimated.share()
recorded.share()

# a shell ignores them for what it runs in the background, and children would inherit that
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _handler)

# no deadline: a shared machine is slow now and then. In CI the same examples every time.
settings.register_profile("ligerprof", deadline=None, max_examples=25, derandomize=bool(os.environ.get("CI")))
settings.register_profile("thorough", deadline=None, max_examples=500)
settings.load_profile("ligerprof")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of long.txt, before pytest chooses by marks."""
    listed = durations.listed()
    for item in items:
        if item.nodeid in listed:
            item.add_marker("long")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let later collections of garbage pass over what imports made: a million objects, half a second each time."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `gpu` that was asked for where there is no CUDA device."""
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture
def no_log_records() -> Iterator[None]:
    """Let libraries log nothing: pytest keeps their records, and with them frames and tensors of import errors."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="session")
def cell_starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CellStarter]:
    """Start cells from one fork server, which takes seconds of CPU time to import torch and transformers."""
    with CellStarter(tmp_path_factory.mktemp("cells")) as starter:
        yield starter


@pytest.fixture
def quick_cells(cell_starter: CellStarter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sweeps in this process share a fork server."""
    monkeypatch.setattr(session, "CellStarter", lambda _folder: nullcontext(cell_starter))
