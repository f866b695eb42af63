"""A pytest plug-in: `@pytest.mark.limit_gpu_memory("20GiB")` fails a test that allocates more on a GPU."""

import io
from collections.abc import Generator, Mapping
from contextlib import suppress
from typing import Any

import pytest

_MARK = "limit_gpu_memory"
_HELP = f'{_MARK}(size): fail if the test allocates more on a GPU, such as "20GiB"; skipped without a GPU'
_MAX_ENTRIES = 1_000_000


class GpuMemory:
    """The allocator history of all GPUs while a test runs."""

    @staticmethod
    def missing_reason() -> str | None:
        """Why nothing can be measured here; None if it can."""
        try:
            import torch
        except ImportError:
            return "torch is not installed"
        return None if torch.cuda.is_available() else "no CUDA device"

    def start(self) -> None:
        """Reset the peaks and start recording."""
        import torch

        cuda: Any = torch.cuda
        cuda.init()
        for device in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(device)
        cuda.memory._record_memory_history(max_entries=_MAX_ENTRIES, stacks="python", context="alloc")

    def stop(self) -> tuple[int, Mapping[str, Any]]:
        """Stop recording; the highest max_memory_allocated() of the GPUs, and the recording."""
        import torch

        memory: Any = torch.cuda.memory
        peak_bytes = max(torch.cuda.max_memory_allocated(device) for device in range(torch.cuda.device_count()))
        snapshot = memory._snapshot()
        memory._record_memory_history(enabled=None)
        return peak_bytes, snapshot


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line("markers", _HELP)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Check the marker, and skip the test where no GPU can be measured."""
    if item.get_closest_marker(_MARK) is None:
        return
    _limit_bytes(item)
    if (reason := GpuMemory.missing_reason()) is not None:
        pytest.skip(f"{_MARK}: {reason}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Measure the test, and fail it with a list of what held the memory."""
    if item.get_closest_marker(_MARK) is None:
        return (yield)
    memory = GpuMemory()
    memory.start()
    try:
        result = yield
    except BaseException:
        # the test's own error stays, also where the device can no longer be used
        with suppress(Exception):
            _, snapshot = memory.stop()
            if _ran_out(snapshot):
                item.add_report_section("call", "GPU memory", _explained(snapshot))
        raise
    peak_bytes, snapshot = memory.stop()
    limit_bytes = _limit_bytes(item)
    if peak_bytes > limit_bytes:
        from ligerprof.units import format_bytes

        pytest.fail(
            f"{format_bytes(peak_bytes)} allocated, over the limit of {format_bytes(limit_bytes)}\n"
            f"{_explained(snapshot)}",
            pytrace=False,
        )
    return result


def _limit_bytes(item: pytest.Item) -> int:
    from ligerprof.errors import LigerprofError
    from ligerprof.units import parse_bytes

    mark = item.get_closest_marker(_MARK)
    if mark is None or len(mark.args) != 1 or mark.kwargs or type(mark.args[0]) not in (str, int):
        raise pytest.UsageError(f'{item.nodeid}: {_MARK} takes one size, such as "20GiB".')
    try:
        return parse_bytes(str(mark.args[0]))
    except LigerprofError as error:
        raise pytest.UsageError(f"{item.nodeid}: {_MARK}: {error}") from None


def _ran_out(snapshot: Mapping[str, Any]) -> bool:
    return any(event.get("action") == "oom" for trace in snapshot.get("device_traces", ()) for event in trace)


def _explained(snapshot: Mapping[str, Any]) -> str:
    from ligerprof.analyzers.explain.analysis import explain
    from ligerprof.errors import LigerprofError
    from ligerprof.reports.peak import render_peak
    from ligerprof.reports.terminal import console
    from ligerprof.snapshots.reader import Snapshot

    text = io.StringIO()
    try:
        report = explain(Snapshot.from_dict(snapshot, source="the test"))
    except LigerprofError as error:
        # the test switched the history off, for example
        return f"What held the memory is not known: {error}"
    console(text).print(render_peak(report))
    return text.getvalue()
