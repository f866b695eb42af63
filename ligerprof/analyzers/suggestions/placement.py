"""Place the blocks of a recording anew after some have shrunk: the parts of free blocks that torch does not split off.

A request of 1 to 10 MiB can take a free block that is up to 1 MiB larger. Which blocks are free then depends on the
sizes of all others, so the allocator's rules are applied to the whole recording.
"""

import numpy as np

from ligerprof.analyzers.suggestions.case import Case
from ligerprof.snapshots.trace import Int64s

# a few steps of a Llama 1B, placed in a fifth of a second
_MOST_EVENTS = 40_000
# other settings of the allocator, other streams
_LARGEST_DIFFERENCE = 0.01


def unsplit_after_shrinking(case: Case, blocks: Int64s, divisor: int) -> Int64s | None:
    """By how much allocated bytes differ at each moment from those with the blocks' sizes divided.

    None if the recording is too long, or if placing its own sizes does not give what it contains.
    """
    replayed = case.replayed
    events = len(replayed.allocated_by) + np.count_nonzero(replayed.freed_by >= 0)
    if events > _MOST_EVENTS or (replayed.allocated_by < 0).any():
        return None
    as_recorded = case.once(_placed, b"", 1)
    off = np.abs(as_recorded - replayed.allocated_bytes).max()
    if off > _LARGEST_DIFFERENCE * replayed.allocated_bytes.max():
        return None
    shrunk = case.edit()
    shrunk.resize(blocks, divisor)
    found: Int64s = case.once(_placed, blocks.tobytes(), divisor) - as_recorded
    return found - (shrunk.allocated_bytes(None) - replayed.allocated_bytes)


def _placed(case: Case, blocks: bytes, divisor: int) -> Int64s:
    """Allocated bytes at each moment if some blocks request fewer bytes."""
    from ligerprof.torch_memory.allocator.caching import CachingAllocator

    replayed, allocator = case.replayed, CachingAllocator()
    requested = replayed.requested_bytes.copy()
    shrunk = np.frombuffer(blocks, dtype=np.int64)
    requested[shrunk] = np.maximum(requested[shrunk] // divisor, 1)
    freed = np.flatnonzero(replayed.freed_by >= 0)
    events = np.append(replayed.allocated_by, replayed.freed_by[freed])
    numbers = np.append(np.arange(len(requested)), -1 - freed)
    order = np.argsort(events, kind="stable")
    sizes, held = requested.tolist(), {}
    allocated = np.zeros(replayed.last_moment + 1, dtype=np.int64)
    changes = []
    for number in numbers[order].tolist():
        before = allocator.allocated_bytes
        if number >= 0:
            held[number] = allocator.malloc(sizes[number])
        else:
            allocator.free(held.pop(-1 - number))
        changes.append(allocator.allocated_bytes - before)
    np.add.at(allocated, events[order] + 1, changes)
    return np.cumsum(allocated)
