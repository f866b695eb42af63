"""The memory of the simulated GPU: the caching allocator, its history, and streams that still use a block."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ligerprof.gpus import GpuSpec
from ligerprof.runs.simulated.device import DeviceLimits, SimulatedDevice
from ligerprof.snapshots.writer import EventContext, TraceEvent, build_snapshot
from ligerprof.torch_memory.allocator.blocks import Block
from ligerprof.torch_memory.allocator.caching import AllocatorFullError
from ligerprof.torch_memory.allocator.settings import AllocatorSettings

# aten/src/ATen/cuda/CublasHandlePool.cpp
_WORKSPACES = {"cublas": "at::cuda::getCUDABlasWorkspace()", "cublaslt": "at::cuda::getCUDABlasLtWorkspace()"}
# torch's own default for max_entries is the largest integer
_MOST_ENTRIES = 2**40


class Device(SimulatedDevice):
    """The allocator behind torch's storages, with torch's history of events.

    Attributes:
        allocations: number of blocks handed out so far.
        frees: number of blocks taken back so far.
        failures: how often it ran out.
        observers: called with (device, requested, allocated, free bytes) when memory runs out.
    """

    def __init__(self, gpu: GpuSpec, *, capacity_bytes: int, settings: AllocatorSettings) -> None:
        limits = DeviceLimits(capacity_bytes=capacity_bytes, limit_bytes=None)
        super().__init__(gpu, limits, settings, record=False, observe=self._note)
        self.capacity_bytes = capacity_bytes
        self.allocations = self.frees = self.segments = self.segment_frees = self.failures = 0
        self.observers: list[Callable[[int, int, int, int], None]] = []
        self.lock = threading.RLock()
        self._history: deque[TraceEvent] | None = None
        self._takes_stacks = False
        self._blocks: dict[int, Block] = {}
        # blocks whose storage has ended while another stream may use them
        self._used_by: dict[int, set[int]] = {}
        self._waiting: list[Block] = []
        self._ended: list[int] | None = None
        # name of the C++ function that allocates a workspace; attribution reads it
        self._native = ""

    def start_history(self, *, most_entries: int | None, stacks: bool) -> None:
        """Record events from now on, the newest `most_entries`, with Python stacks of allocations or without."""
        limit = None if most_entries is None or most_entries > _MOST_ENTRIES else most_entries
        self._history = deque(self._history or (), maxlen=limit)
        self._takes_stacks = stacks

    def stop_history(self) -> None:
        """Stop recording and drop the events."""
        self._history, self._takes_stacks = None, False
        self._tracebacks.clear()

    def clear_history(self) -> None:
        """Drop the events."""
        if self._history is not None:
            self._history.clear()

    def take(self, size_bytes: int, stream: int) -> int:
        """The address of a new block.

        Raises:
            AllocatorFullError: memory ran out; the observers have been called.
        """
        with self.lock:
            self.stream = stream
            block = self.allocate(size_bytes)
            self._blocks[block.address] = block
            return block.address

    def allocate(self, size_bytes: int) -> Block:
        """Allocate a block on the current stream, once blocks that waited for other streams are free.

        The GPU keeps up with the host: what other streams were given has ended by the next allocation.
        """
        self.synchronize(-1)
        try:
            block = super().allocate(size_bytes)
        except AllocatorFullError as full:
            self.failures += 1
            free = max(self.capacity_bytes - full.reserved_bytes, 0)
            for observe in self.observers:
                observe(0, size_bytes, self.allocator.allocated_bytes, free)
            raise
        self.allocations += 1
        return block

    def hold_for_good(self, name: str, size_bytes: int) -> None:
        """Allocate a workspace that a library never frees, with the C++ function that a GPU's stack shows."""
        self._native = _WORKSPACES.get(name.split(" ", maxsplit=1)[0], "")
        try:
            super().hold_for_good(name, size_bytes)
        finally:
            self._native = ""

    def release(self, block: Block) -> None:
        """Take a block back."""
        self.frees += 1
        super().release(block)

    def give_back(self, address: int) -> None:
        """Free the block of a storage that ended, or as soon as the streams that use it have ended their work."""
        with self.lock:
            if self._ended is not None:
                self._ended.append(address)
                return
            block = self._blocks.pop(address, None)
            if block is None:
                return
            if self._used_by.get(address):
                self._waiting.append(block)
            else:
                self.release(block)

    @contextmanager
    def giving_back_by_address(self) -> Iterator[None]:
        """Free the blocks of storages that end inside in the order of their addresses."""
        ended = self._ended = []
        try:
            yield
        finally:
            self._ended = None
            for address in sorted(ended):
                self.give_back(address)

    def use_on(self, address: int, stream: int) -> None:
        """Note that another stream uses a block, as `record_stream` does."""
        block = self._blocks.get(address)
        if block is not None and block.pool.stream != stream:
            self._used_by.setdefault(address, set()).add(stream)

    def synchronize(self, stream: int) -> None:
        """End the work of a stream, or of all if it is negative; free the blocks that wait for it."""
        with self.lock:
            if not self._waiting and not self._used_by:
                return
            kept = []
            for block in self._waiting:
                users = self._used_by[block.address]
                if stream >= 0:
                    users.discard(stream)
                if stream < 0 or not users:
                    del self._used_by[block.address]
                    self.release(block)
                else:
                    kept.append(block)
            self._waiting = kept

    def size_of(self, address: int) -> int:
        """Bytes of the storage at an address, 0 if there is none."""
        block = self._blocks.get(address)
        return 0 if block is None else block.requested_bytes

    def snapshot(self) -> dict[str, Any]:
        """What torch.cuda.memory._snapshot() returns."""
        with self.lock:
            self._resolve_stacks()
            return build_snapshot(self.allocator, list(self._history or ()), self._settings)

    def stamp_context(self) -> EventContext:
        """The context of an event without a stack; its stamp is the metadata of the events that follow."""
        return self._stamp

    def _context(self) -> EventContext | None:
        if not self._takes_stacks:
            return self._stamp
        context = self._with_stack()
        if self._native:
            context.native = {"name": self._native, "filename": "??", "line": 0}
        return context

    def _note(self, action: str, address: int, size_bytes: int, context: object) -> None:
        if action in ("segment_alloc", "segment_map"):
            self.segments += 1
        elif action in ("segment_free", "segment_unmap"):
            self.segment_frees += 1
        if self._history is not None:
            kept = context if isinstance(context, EventContext) else self._stamp
            now = time.time_ns() // 1000
            self._history.append(TraceEvent(action, address, size_bytes, kept, self._event_stream, now))
