"""The history of a device that allocates for each operation of the CPU, in place of the CUDA allocator's."""

from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ligerprof.runs.recording.record import Failure
from ligerprof.runs.recording.saved import storage_address
from ligerprof.snapshots.stamp import Stamp
from tests.torch_memory.allocator.programs import SlowAllocator


class OperationHistory(TorchDispatchMode):
    """Allocates and frees a block under the current stamp for every operation that torch dispatches."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.program = SlowAllocator()
        self.operations: list[tuple[str, Stamp | None]] = []
        self.text = ""
        self.started: dict[str, Any] | None = None
        # events before the history was on
        self.dropped = 0
        self.starts: list[dict[str, Any]] = []
        self.last_failure: Failure | None = None
        self.observers: list[Any] = []
        self.fails_at = fails_at

    def start(self, **settings: Any) -> None:
        if self.started is None or settings.get("clear"):
            self.dropped = len(self.program.events)
        self.started = settings
        self.starts.append(settings)

    def stop(self) -> None:
        self.started = None

    def stamp(self, text: str) -> None:
        self.text = text

    def snapshot(self) -> dict[str, Any]:
        return self.program.snapshot(drop=self.dropped if self.started else len(self.program.events))

    def locate(self, tensor: torch.Tensor) -> tuple[int, int]:
        return 0, storage_address(tensor)

    def now_us(self) -> int:
        return len(self.operations)

    def keep_on(self, say: Any) -> None:
        pass

    def release(self) -> None:
        pass

    def peak_bytes(self, _counter: str = "allocated_bytes") -> int:
        return max(self.program.allocated)

    def events(self) -> int:
        return len(self.program.events)

    def observe_out_of_memory(self, observer: Any) -> None:
        self.observers.append(observer)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.started is not None:
            number = len(self.operations)
            self.operations.append((func._overloadpacket.__name__, Stamp.parse(self.text)))
            if number == self.fails_at:
                self.last_failure = Failure(2**20, self.program.allocated[-1])
                for observer in self.observers:
                    observer()
                raise torch.OutOfMemoryError("CUDA out of memory.")
            self._stamped(partial(self.program.alloc, number, 2**20), self.text)
            self.release_held(number)
        return func(*args, **(kwargs or {}))

    def hold(self, size_bytes: int, *, has_stamp: bool = True) -> int:
        """Allocate a block that stays; threads other than the recorder's have no stamp."""
        number = -1 - len(self.program.events)
        self._stamped(lambda: self.program.alloc(number, size_bytes), self.text if has_stamp else "")
        return number

    def release_held(self, number: int) -> None:
        """Free a block that was held."""

        def free() -> None:
            self.program.request_free(number)
            self.program.complete_free(number)

        self._stamped(free, self.text)

    def _stamped(self, change: Any, text: str) -> None:
        first = len(self.program.events)
        change()
        for event in self.program.events[first:]:
            event["user_metadata"] = text

    def stamps_of(self, name: str) -> list[Stamp]:
        return [stamp for operation, stamp in self.operations if operation == name and stamp is not None]
