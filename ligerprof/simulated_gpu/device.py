"""The memory of the simulated GPU: the caching allocator, its history, and streams that still use a block."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from ligerprof.gpus import GpuSpec
from ligerprof.runs.simulated.device import DeviceLimits, SimulatedDevice
from ligerprof.simulated_gpu.addresses import Addresses
from ligerprof.simulated_gpu.history import ContextLike, History
from ligerprof.snapshots.writer import EventContext, build_snapshot, event_time_us
from ligerprof.torch_memory.allocator.blocks import Block
from ligerprof.torch_memory.allocator.caching import AllocatorFullError
from ligerprof.torch_memory.allocator.settings import AllocatorSettings

# aten/src/ATen/cuda/CublasHandlePool.cpp
_WORKSPACES = {"cublas": "at::cuda::getCUDABlasWorkspace()", "cublaslt": "at::cuda::getCUDABlasLtWorkspace()"}
_SEGMENTS_MADE = frozenset({"segment_alloc", "segment_map"})
_SEGMENTS_FREED = frozenset({"segment_free", "segment_unmap"})
# torch's own default for max_entries is the largest integer
_MOST_ENTRIES = 2**40


class Tape:
    """What happens on the device while something runs.

    Attributes:
        events: requested bytes, address and context of each allocation; 0 in the place of the bytes if it is a free.
        spoiled: whether something else happened than allocations and frees of one stream.
    """

    def __init__(self, stream: int) -> None:
        self.stream = stream
        self.events: list[tuple[int, int, EventContext]] = []
        self.spoiled = False


class Device(SimulatedDevice):
    """The allocator behind torch's storages, with torch's history of events.

    Attributes:
        addresses: where the driver places segments.
        allocations: number of blocks handed out so far.
        frees: number of blocks taken back so far.
        failures: how often it ran out.
        ran_out: how it did so at last.
        given: the context of events that are repeated.
        tapes: what notes the events now.
        observers: called with (device, requested, allocated, free bytes) when memory runs out.
    """

    def __init__(
        self, gpu: GpuSpec, *, capacity_bytes: int, settings: AllocatorSettings, limit_bytes: int | None = None
    ) -> None:
        limits = DeviceLimits(capacity_bytes=capacity_bytes, limit_bytes=limit_bytes)
        super().__init__(gpu, limits, settings, record=False, observe=self._note)
        self.addresses = Addresses()
        self.allocator.place = self.addresses.place
        self.capacity_bytes = capacity_bytes
        self.allocations = self.frees = self.segments = self.segment_frees = self.failures = 0
        self.ran_out: AllocatorFullError | None = None
        self.observers: list[Callable[[int, int, int, int], None]] = []
        self.lock = threading.RLock()
        self._history: History | None = None
        self._takes_stacks = self._counts = False
        self._blocks: dict[int, Block] = {}
        # blocks whose storage has ended while another stream may use them
        self._used_by: dict[int, set[int]] = {}
        self._waiting: list[Block] = []
        self._ended: list[int] | None = None
        # name of the C++ function that allocates a workspace; attribution reads it
        self._native = ""
        self.tapes: list[Tape] = []
        self.given: EventContext | None = None

    def start_history(self, *, most_entries: int | None, stacks: bool, counts: bool = False) -> None:
        """Record events from now on, the newest `most_entries`, with Python stacks of allocations or without.

        Args:
            counts: whether an event's time is its number, the same in each run.
        """
        self._counts = counts
        limit = None if most_entries is None or most_entries > _MOST_ENTRIES else most_entries
        if self._history is None or self._history.limit != limit:
            self._history = History(limit, self._history or ())
        self._takes_stacks = stacks

    def now_us(self) -> int:
        """The time of the next event."""
        if self._counts and self._history is not None:
            return event_time_us(len(self._history))
        return time.time_ns() // 1000

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
        if self._waiting:
            self.synchronize(-1)
        try:
            # `super()` would be an object for each block
            block = SimulatedDevice.allocate(self, size_bytes)
        except AllocatorFullError as full:
            self.failures += 1
            # its own copy: the traceback of the one that is raised keeps the program's tensors
            self.ran_out = AllocatorFullError(
                requested_bytes=full.requested_bytes,
                allocated_bytes=full.allocated_bytes,
                reserved_bytes=full.reserved_bytes,
                limit_bytes=full.limit_bytes,
            )
            free = max(self.capacity_bytes - full.reserved_bytes, 0)
            for observe in self.observers:
                observe(0, size_bytes, self.allocator.allocated_bytes, free)
            raise
        self.allocations += 1
        for tape in self.tapes:
            tape.events.append((size_bytes, block.address, self._context_of(block)))
            tape.spoiled |= self.stream != tape.stream
        return block

    def hold_for_good(self, name: str, size_bytes: int) -> None:
        """Allocate a workspace that a library never frees, with the C++ function that a GPU's stack shows."""
        if name in self._held_for_good:
            return
        self._native = _WORKSPACES.get(name.split(" ", maxsplit=1)[0], "")
        try:
            super().hold_for_good(name, size_bytes)
        finally:
            self._native = ""

    def release(self, block: Block) -> None:
        """Take a block back."""
        self.frees += 1
        self._event_stream = block.pool.stream
        context = self.given or self._stamp
        for tape in self.tapes:
            tape.events.append((0, block.address, context))
        self.allocator.free(block, context)

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
        self.spoil_tapes()
        block = self._blocks.get(address)
        if block is not None and block.pool.stream != stream:
            self._used_by.setdefault(address, set()).add(stream)

    def synchronize(self, stream: int) -> None:
        """End the work of a stream, or of all if it is negative; free the blocks that wait for it."""
        self.spoil_tapes()
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

    @contextmanager
    def taping(self) -> Iterator[Tape]:
        """Note what happens inside."""
        tape = Tape(self.stream)
        self.tapes.append(tape)
        try:
            yield tape
        finally:
            self.tapes.remove(tape)

    def spoil_tapes(self) -> None:
        """What runs depends on values, or on other streams."""
        for tape in self.tapes:
            tape.spoiled = True

    def context_like(self, context: EventContext, stamp: str, other: str) -> EventContext:
        """A context with the stack of another, and its stamp with another beginning."""
        if self._history is None:
            return self._stamp
        text = context.stamp
        text = other + text[len(stamp) :] if text.startswith(stamp) else text
        return ContextLike(text, context) if self._takes_stacks else EventContext(text)

    def room_bytes(self) -> int:
        """What the allocator can still reserve."""
        return self.allocator.room_bytes()

    def snapshot(self) -> dict[str, Any]:
        """What torch.cuda.memory._snapshot() returns."""
        with self.lock:
            self._resolve_stacks()
            return build_snapshot(self.allocator, list(self._history or ()), self._settings)

    def stamp_context(self) -> EventContext:
        """The context of an event without a stack; its stamp is the metadata of the events that follow."""
        return self._stamp

    def _context_of(self, block: Block) -> EventContext:
        return block.context if isinstance(block.context, EventContext) else self._stamp

    def _context(self) -> EventContext | None:
        if self.given is not None:
            return self.given
        if not self._takes_stacks:
            return self._stamp
        context = self._with_stack()
        if self._native:
            context.native = {"name": self._native, "filename": "??", "line": 0}
        return context

    def _note(self, action: str, address: int, size_bytes: int, context: object) -> None:
        if self._history is not None:
            kept = context if isinstance(context, EventContext) else self._stamp
            self._history.append(action, address, size_bytes, kept, self._event_stream, self.now_us())
        # nearly all events are allocations and frees
        if action in _SEGMENTS_MADE:
            self.segments += 1
        elif action in _SEGMENTS_FREED:
            self.segment_frees += 1

    def repeated_calls(
        self, blocks: int
    ) -> tuple[Callable[[int, EventContext], Block], Callable[[Block, object], None]]:
        """Functions that allocate and free on the current stream, `blocks` times each, with a context."""
        if self.tapes:
            return lambda size_bytes, _context: self.allocate(size_bytes), lambda block, _context: self.release(block)
        # the allocator itself, without two calls of Python for each block
        self.allocations += blocks
        self.frees += blocks
        self._event_stream = self.stream
        return partial(self.allocator.malloc, stream=self.stream), self.allocator.free
