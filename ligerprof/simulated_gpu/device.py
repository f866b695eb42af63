"""The memory of the simulated GPU: the caching allocator, its history, and streams that still use a block."""

import gc
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch

from ligerprof.gpus import GpuSpec
from ligerprof.serialization import select
from ligerprof.snapshots.writer import EventContext, Frame, TraceEvent, build_snapshot, event_time_us
from ligerprof.torch_memory.allocator.caching import Addresses, AllocatorFullError, Block, CachingAllocator, Observer
from ligerprof.torch_memory.allocator.settings import AllocatorSettings
from ligerprof.torch_memory.dtypes import Scratch


class History:
    """The newest events, in columns: Python's collector would visit millions of objects otherwise."""

    def __init__(self, limit: int | None, events: Iterable[TraceEvent] = ()) -> None:
        self.limit = limit
        self._columns = tuple(deque[object](maxlen=limit) for _ in TraceEvent._fields)
        self._appends = tuple(column.append for column in self._columns)
        for event in events:
            self.append(*event)

    def append(
        self, action: str, address: int, size_bytes: int, context: EventContext, stream: int, time_us: int | None
    ) -> None:
        one, two, three, four, five, six = self._appends
        one(action)
        two(address)
        three(size_bytes)
        four(context)
        five(stream)
        six(time_us)

    def clear(self) -> None:
        for column in self._columns:
            column.clear()

    def __iter__(self) -> Iterator[TraceEvent]:
        # the collector frees tensors, and their events would come between the columns
        was_on = gc.isenabled()
        gc.disable()
        try:
            columns = [column.copy() for column in self._columns]
        finally:
            if was_on:
                gc.enable()
        return map(TraceEvent, *columns)

    def __len__(self) -> int:
        return len(self._columns[0])


class ContextLike(EventContext):
    """A context with a stamp of its own, and the stack of another, which may be resolved later."""

    __slots__ = ("_other",)

    def __init__(self, stamp: str, other: EventContext) -> None:
        self.stamp = stamp
        self.native = None
        self._other = other

    @property
    def frames(self) -> Sequence[Frame]:  # type: ignore[override]
        return self._other.frames


_LIBRARY_IN_LOWER_GAP = "bitsandbytes.cextension"
# of an AllocatorFullError
FULL_SIZES = ("requested_bytes", "allocated_bytes", "reserved_bytes", "limit_bytes")
# aten/src/ATen/cuda/CublasHandlePool.cpp
_WORKSPACES = {"cublas": "at::cuda::getCUDABlasWorkspace()", "cublaslt": "at::cuda::getCUDABlasLtWorkspace()"}
_SEGMENTS_MADE = frozenset({"segment_alloc", "segment_map"})
_SEGMENTS_FREED = frozenset({"segment_free", "segment_unmap"})
# torch's own default for max_entries is the largest integer
_MOST_ENTRIES = 2**40
# the caller of autograd's engine: on a GPU, the frames below it belong to another thread
_ENGINE_FRAME = "_engine_run_backward"
# frames whose lines tell most stacks apart
_TELLING_FRAMES = 6
# frames between an operator and the recorder, which a GPU recording does not have
_OWN_FILES = (
    "/ligerprof/runs/simulated/",
    "/ligerprof/runs/tapes/",
    "/ligerprof/simulated_gpu/",
    "/ligerprof/torch_memory/",
    "/torch/_ops.py",
    "/torch/_compile.py",
    "/torch/_dynamo/",
)


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


class Device:
    """The allocator behind torch's storages, with torch's history of events.

    Attributes:
        stream: the current CUDA stream; 0 is the default one.
        given: the context of events that are repeated.
        workspace: name of the library's workspace that is allocated now, "" if none is.
        observer: called with (action, address, bytes, context) for each event of the allocator, or None.
        observers: called with (device, requested, allocated, free bytes) when memory runs out.
    """

    def __init__(
        self, gpu: GpuSpec, *, capacity_bytes: int, settings: AllocatorSettings, limit_bytes: int | None = None
    ) -> None:
        self.gpu, self._settings = gpu, settings
        self._tracebacks: list[tuple[EventContext, Any]] = []
        # the context of an event without a stack; its stamp is the metadata of the events that follow
        self.stamped = EventContext("")
        self._workspaces: dict[str, Block] = {}
        self.stream = self._event_stream = 0
        self.allocator = CachingAllocator(
            settings=settings, capacity_bytes=capacity_bytes, limit_bytes=limit_bytes, observe=self._note
        )
        self.addresses = Addresses(library_in_gap=lambda: _LIBRARY_IN_LOWER_GAP in sys.modules)
        self.allocator.place = self.addresses.place
        self.capacity_bytes = capacity_bytes
        self.allocations = self.frees = self.segments = self.segment_frees = self.failures = 0
        self.ran_out: AllocatorFullError | None = None
        self.observers: list[Callable[[int, int, int, int], None]] = []
        self.lock = threading.RLock()
        self._history: History | None = None
        self._annotations: list[dict[str, Any]] = []
        self._takes_stacks = self._counts = False
        self._blocks: dict[int, Block] = {}
        # blocks whose storage has ended while another stream may use them
        self._used_by: dict[int, set[int]] = {}
        self._waiting: list[Block] = []
        self._ended: list[int] | None = None
        self.workspace = ""
        self.tapes: list[Tape] = []
        self.observer: Observer | None = None
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
        self._history, self._takes_stacks = None, False
        self._tracebacks.clear()
        self._annotations.clear()

    def clear_history(self) -> None:
        self._annotations.clear()
        if self._history is not None:
            self._history.clear()

    def annotate(self, name: str, stage: str) -> None:
        """Note where a named range begins (START) or ends (END), as torch does for its optimizers' steps."""
        if self._history is not None:
            # the next event may have the time of now
            time_us = self.now_us() - (stage == "END")
            self._annotations.append({"name": name, "device": 0, "stage": stage, "time_us": time_us})

    def stamp(self, text: str) -> None:
        self.stamped = EventContext(text)

    def take(self, size_bytes: int, stream: int) -> int:
        """The address of a new block; raises AllocatorFullError, after the observers, if memory runs out."""
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
            self._event_stream = self.stream
            block = self.allocator.malloc(size_bytes, self._context(), stream=self.stream)
        except AllocatorFullError as full:
            self.failures += 1
            # its own copy: the traceback of the one that is raised keeps the program's tensors
            self.ran_out = AllocatorFullError(**select(full, *FULL_SIZES))
            free = max(self.capacity_bytes - full.reserved_bytes, 0)
            for observe in self.observers:
                observe(0, size_bytes, self.allocator.allocated_bytes, free)
            raise
        self.allocations += 1
        for tape in self.tapes:
            context = block.context if isinstance(block.context, EventContext) else self.stamped
            tape.events.append((size_bytes, block.address, context))
            tape.spoiled |= self.stream != tape.stream
        return block

    def hold_workspace(self, name: str, size_bytes: int) -> None:
        """Allocate a workspace that a library keeps, once per name."""
        if name in self._workspaces:
            return
        self.workspace = name
        try:
            self._workspaces[name] = self.allocate(size_bytes)
        finally:
            self.workspace = ""

    def clear_workspaces(self) -> None:
        """Free them, as a program may ask for."""
        for block in self._workspaces.values():
            self.release(block)
        self._workspaces.clear()

    def touch(self, *sizes_bytes: int) -> None:
        """Allocate blocks of these sizes together, then free them; sizes of 0 are skipped."""
        with self.held(*sizes_bytes):
            pass

    @contextmanager
    def held(self, *sizes_bytes: int) -> Iterator[None]:
        """Hold blocks of these sizes; they are freed in reverse order, as C++ destroys locals."""
        blocks = [self.allocate(size) for size in sizes_bytes if size > 0]
        try:
            yield
        finally:
            for block in reversed(blocks):
                self.release(block)

    def run_scratch(self, scratch: Scratch) -> None:
        """Allocate and free blocks in the order of an operator's code."""
        held: list[Block] = []
        for size in scratch:
            if size > 0:
                held.append(self.allocate(size))
            elif size < 0:
                oldest = next(block for block in held if block.requested_bytes == -size)
                held.remove(oldest)
                self.release(oldest)

    def release(self, block: Block) -> None:
        self.frees += 1
        self._event_stream = block.pool.stream
        context = self.given or self.stamped
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
            return self.stamped
        text = context.stamp
        text = other + text[len(stamp) :] if text.startswith(stamp) else text
        return ContextLike(text, context) if self._takes_stacks else EventContext(text)

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes, as cudaMemGetInfo gives them."""
        return self.capacity_bytes - self.allocator.reserved_bytes, self.gpu.memory_bytes

    def snapshot(self) -> dict[str, Any]:
        """What torch.cuda.memory._snapshot() returns."""
        with self.lock:
            self._resolve_stacks()
            made = build_snapshot(self.allocator, list(self._history or ()), self._settings)
            return {**made, "external_annotations": list(self._annotations)}

    def _resolve_stacks(self) -> None:
        tracebacks = [traceback for _, traceback in self._tracebacks]
        # torch._C._profiler is what torch.cuda.memory itself resolves Python frames with
        stacks = torch._C._profiler.symbolize_tracebacks(tracebacks) if tracebacks else []
        for (context, _), frames in zip(self._tracebacks, _device_thread_frames(stacks), strict=True):
            context.frames = [context.native, *frames] if context.native else frames
        self._tracebacks.clear()

    def _context(self) -> EventContext | None:
        if self.given is not None:
            return self.given
        if not self._takes_stacks:
            return self.stamped
        context = EventContext(self.stamped.stamp)
        self._tracebacks.append((context, torch._C._profiler.gather_traceback(python=True, script=False, cpp=False)))
        # attribution reads the name of the C++ function
        if native := _WORKSPACES.get(self.workspace.split(" ", maxsplit=1)[0]):
            context.native = {"name": native, "filename": "??", "line": 0}
        return context

    def _note(self, action: str, address: int, size_bytes: int, context: object) -> None:
        if self.observer is not None:
            self.observer(action, address, size_bytes, context)
        if self._history is not None:
            kept = context if isinstance(context, EventContext) else self.stamped
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


@cache
def _is_own(file: str) -> bool:
    return any(part in file for part in _OWN_FILES)


def _device_thread_frames(stacks: Sequence[Sequence[Frame]]) -> Iterator[Sequence[Frame]]:
    """Drop the simulator's own frames, and frames that are in another thread on a GPU; equal stacks are one object."""
    groups: dict[tuple[int, ...], list[tuple[Sequence[Frame], Sequence[Frame]]]] = {}
    for stack in stacks:
        first = next((index for index, frame in enumerate(stack) if not _is_own(frame["filename"])), len(stack))
        # not by `id`, which calls every audit hook
        lines = [frame["line"] for frame in stack[first : first + _TELLING_FRAMES]]
        group = groups.setdefault((len(stack), *lines), [])
        found = next((frames for other, frames in group if other == stack), None)
        if found is None:
            names = [frame["name"] for frame in stack]
            last = names.index(_ENGINE_FRAME) if _ENGINE_FRAME in names else len(stack)
            found = stack[first : max(last, first)]
            group.append((stack, found))
        yield found
