"""The simulated GPU: its allocator, and its events with their stacks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ligerprof.gpus import GpuSpec
from ligerprof.snapshots.writer import EventContext, Frame, TraceEvent, build_snapshot, event_time_us
from ligerprof.torch_memory.allocator.blocks import Block
from ligerprof.torch_memory.allocator.caching import CachingAllocator, Observer
from ligerprof.torch_memory.allocator.settings import AllocatorSettings
from ligerprof.torch_memory.scratch import Scratch

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


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceLimits:
    """Limits on reserved memory.

    Attributes:
        capacity_bytes: the GPU's memory less its CUDA context.
        limit_bytes: a lower limit set by the user, or None.
    """

    capacity_bytes: int
    limit_bytes: int | None


class SimulatedDevice:
    """A caching allocator and a recording of its events.

    Args:
        settings: PYTORCH_CUDA_ALLOC_CONF.
        record: whether to keep events and Python frames for a snapshot.
        observe: receives the events otherwise.

    Attributes:
        gpu: the simulated GPU.
        allocator: its caching allocator, with all counters.
        events: all events so far, if they are recorded.
        stream: the current CUDA stream; 0 is the default one.
    """

    def __init__(
        self,
        gpu: GpuSpec,
        limits: DeviceLimits,
        settings: AllocatorSettings,
        *,
        record: bool,
        observe: Observer | None = None,
    ) -> None:
        self.gpu = gpu
        self._settings = settings
        self._record = record
        self.events: list[TraceEvent] = []
        self._tracebacks: list[tuple[EventContext, Any]] = []
        self._stamp = EventContext("")
        self._held_for_good: set[str] = set()
        self.stream = self._event_stream = 0
        self.allocator = CachingAllocator(
            settings=settings,
            capacity_bytes=limits.capacity_bytes,
            limit_bytes=limits.limit_bytes,
            observe=self._keep if record else observe,
        )

    def now_us(self) -> int:
        """The time of the next event."""
        return event_time_us(len(self.events))

    def stamp(self, text: str) -> None:
        """Stamp the following events."""
        self._stamp = EventContext(text)

    def allocate(self, size_bytes: int) -> Block:
        """Allocate a block and record its stack."""
        self._event_stream = self.stream
        return self.allocator.malloc(size_bytes, self._context(), stream=self.stream)

    def release(self, block: Block) -> None:
        """Free a block."""
        self._event_stream = block.pool.stream
        self.allocator.free(block, self._stamp)

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
            else:
                oldest = next(block for block in held if block.requested_bytes == -size)
                held.remove(oldest)
                self.release(oldest)

    def hold_for_good(self, name: str, size_bytes: int) -> None:
        """Allocate a workspace that a library never frees, once per name."""
        if name not in self._held_for_good:
            self._held_for_good.add(name)
            self.allocate(size_bytes)

    def snapshot(self) -> dict[str, Any]:
        """Build torch's snapshot dict from the recording so far."""
        self._resolve_stacks()
        return build_snapshot(self.allocator, self.events, self._settings)

    def _resolve_stacks(self) -> None:
        tracebacks = [traceback for _, traceback in self._tracebacks]
        # torch._C._profiler is what torch.cuda.memory itself resolves Python frames with
        stacks = torch._C._profiler.symbolize_tracebacks(tracebacks) if tracebacks else []
        for (context, _), frames in zip(self._tracebacks, _device_thread_frames(stacks), strict=True):
            context.frames = [context.native, *frames] if context.native else frames
        self._tracebacks.clear()

    def _keep(self, action: str, address: int, size_bytes: int, context: object) -> None:
        kept = context if isinstance(context, EventContext) else self._stamp
        self.events.append(TraceEvent(action, address, size_bytes, kept, self._event_stream))

    def _context(self) -> EventContext | None:
        return self._with_stack() if self._record else None

    def _with_stack(self) -> EventContext:
        context = EventContext(self._stamp.stamp)
        self._tracebacks.append((context, torch._C._profiler.gather_traceback(python=True, script=False, cpp=False)))
        return context


class _OwnFiles(dict[str, bool]):
    """Whether files are the simulator's own."""

    def __missing__(self, name: str) -> bool:
        self[name] = found = any(part in name for part in _OWN_FILES)
        return found


def _device_thread_frames(stacks: Sequence[Sequence[Frame]]) -> Iterator[Sequence[Frame]]:
    """Drop the simulator's own frames, and frames that are in another thread on a GPU; equal stacks are one object."""
    is_own = _OwnFiles()
    groups: dict[tuple[int, ...], list[tuple[Sequence[Frame], Sequence[Frame]]]] = {}
    for stack in stacks:
        first = next((index for index, frame in enumerate(stack) if not is_own[frame["filename"]]), len(stack))
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
