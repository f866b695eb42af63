"""DeepSpeed without its compiled operators, and with the memory that NCCL keeps for it."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ligerprof.runs.recording.imports import after_import_or_now


def install() -> None:
    """Change its modules when the program imports them."""
    after_import_or_now("deepspeed.ops.adam.cpu_adam", _compile_nothing)
    after_import_or_now("deepspeed.comm.torch", _keep_inputs)


def _compile_nothing(module: Any) -> None:
    module.CPUAdamBuilder = _UncompiledAdam


class _UncompiledAdam:
    """DeepSpeed's builder of DeepSpeedCPUAdam's operator, which returns one that does nothing.

    It would update weights in main memory, which have no values here.
    """

    def load(self) -> Any:
        """The operator's module."""
        return SimpleNamespace(**dict.fromkeys(("create_adam", "adam_update", "destroy_adam"), lambda *_: None))


def _keep_inputs(module: Any) -> None:
    """NCCL keeps the inputs of asynchronous all-gathers until the code waits (TensorShelf in ProcessGroupNCCL.cpp)."""
    module.TorchBackend.all_gather_into_tensor = _keeping_input(module.TorchBackend.all_gather_into_tensor)


class _Gathering:
    """An all-gather that has not been waited for, with its input."""

    def __init__(self, work: Any, source: Any) -> None:
        self._work, self._source = work, source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def wait(self, *arguments: Any, **options: Any) -> Any:
        """Wait, and let go of the input."""
        self._source = None
        return self._work.wait(*arguments, **options)


def _keeping_input(gather: Callable[..., Any]) -> Callable[..., Any]:
    def all_gather(self: Any, output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        work = gather(self, output_tensor, input_tensor, group=group, async_op=async_op)
        return _Gathering(work, input_tensor) if async_op else work

    return all_gather
