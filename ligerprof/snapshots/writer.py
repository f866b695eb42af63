"""Build the snapshot of a simulated allocator, in the form that torch.cuda.memory._snapshot() returns."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ligerprof.torch_memory.allocator.caching import Block, CachingAllocator
from ligerprof.torch_memory.allocator.settings import AllocatorSettings

Frame = dict[str, Any]

# a simulation has an order but no clock, so events are a microsecond apart
_FIRST_MICROSECOND = 1_000_000
# one object, so that the pickled events of frees are like those of allocations, and are read as a table
_NO_FRAMES: list[Frame] = []


@dataclass(eq=False, slots=True)
class EventContext:
    """Where an event came from.

    Attributes:
        stamp: becomes `user_metadata`.
        frames: Python frames, innermost first, each with name, filename and line; may be set after the event.
        native: the C++ function that allocated, if it is known.
    """

    stamp: str
    frames: Sequence[Frame] = ()
    native: Frame | None = None


class TraceEvent(NamedTuple):
    """One event of the allocator; `action` as torch names it.

    Attributes:
        time_us: None: by the number of events before it.
    """

    action: str
    address: int
    size_bytes: int
    context: EventContext
    stream: int = 0
    time_us: int | None = None


def build_snapshot(
    allocator: CachingAllocator, events: Iterable[TraceEvent], settings: AllocatorSettings
) -> dict[str, Any]:
    """Build the snapshot of one device from dicts, lists, text and numbers.

    The context of each block in `allocator` is an EventContext or None; `events` start with an empty device.
    """
    return {
        "segments": [_segment(blocks, settings) for blocks in allocator.segments()],
        "device_traces": [[_trace_entry(index, event) for index, event in enumerate(events)]],
        "allocator_settings": settings.to_snapshot(),
        "external_annotations": [],
    }


def event_time_us(index: int) -> int:
    """The time of an event of a simulation."""
    return _FIRST_MICROSECOND + index


def _trace_entry(index: int, event: TraceEvent) -> dict[str, Any]:
    return {
        "action": event.action,
        # an out-of-memory event has no address; torch writes the free device memory instead
        ("device_free" if event.action == "oom" else "addr"): event.address,
        "size": event.size_bytes,
        "stream": event.stream,
        "time_us": event_time_us(index) if event.time_us is None else event.time_us,
        "compile_context": "N/A",
        "user_metadata": event.context.stamp,
        "frames": event.context.frames or _NO_FRAMES,
    }


def _segment(blocks: Sequence[Block], settings: AllocatorSettings) -> dict[str, Any]:
    head = blocks[0]
    held = [block for block in blocks if block.allocated]
    held_bytes = sum(block.size_bytes for block in held)
    return {
        "device": 0,
        "address": head.address,
        "total_size": sum(block.size_bytes for block in blocks),
        "allocated_size": held_bytes,
        "active_size": held_bytes,
        "requested_size": sum(block.requested_bytes for block in held),
        "stream": head.pool.stream,
        "segment_type": "small" if head.pool.small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": settings.rules.expandable_segments,
        "blocks": [_block(block) for block in blocks],
        "frames": _frames(head.segment_context),
    }


def _block(block: Block) -> dict[str, Any]:
    return {
        "address": block.address,
        "size": block.size_bytes,
        "requested_size": block.requested_bytes,
        "state": "active_allocated" if block.allocated else "inactive",
        "frames": _frames(block.context) if block.allocated else [],
    }


def _frames(context: object) -> Sequence[Frame]:
    return context.frames if isinstance(context, EventContext) else []
