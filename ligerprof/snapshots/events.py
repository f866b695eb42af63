"""A device's events as checked columns of actions, addresses and sizes, the input of a replay."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from ligerprof.errors import SnapshotFormatError
from ligerprof.snapshots.trace import DeviceTrace, Int64s
from ligerprof.text import short_repr

# virtual addresses have at most 57 bits, and no device has 16 TiB
ADDRESS_LIMIT = 2**62
SIZE_LIMIT = 2**44
# sums of sizes stay within 64 bits
TOTAL_LIMIT = 2**62

# events that move memory, and out-of-memory; of all others only the position counts
ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "oom",
)
# torch's other actions: a mark in time, a label for a block, a range of a profiler
_MARKS = ("snapshot", "annotate", "user_defined")
ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, OUT_OF_MEMORY = range(8)
_OTHER = len(ACTIONS)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EventColumns:
    """The part of each event that moves memory.

    Attributes:
        actions: indices into ACTIONS; all other actions share one more index.
        addresses: 0 if an event has none.
        sizes: requested bytes, or a segment's bytes.
    """

    actions: Int64s
    addresses: Int64s
    sizes: Int64s

    @classmethod
    def of(cls, trace: DeviceTrace, where: str) -> "EventColumns":
        """Copy and check the columns of a trace.

        Raises:
            SnapshotFormatError: an event lacks `action` or an address, or these or its size are not in range.
        """
        codes, names = trace.objects("action")
        actions = np.array([_action(name) for name in names], dtype=np.int64)[codes]
        if len(nameless := np.flatnonzero(actions < 0)):
            raise SnapshotFormatError(f"{where}: event {nameless[0]} has no action. Was the file damaged?")
        addresses, sizes = _numbers(trace, "addr", ADDRESS_LIMIT, where), _numbers(trace, "size", SIZE_LIMIT, where)
        if len(lost := np.flatnonzero((actions < OUT_OF_MEMORY) & (addresses == 0))):
            raise SnapshotFormatError(f"{where}: event {lost[0]} has no address. Was the file damaged?")
        if sizes.sum(dtype=np.float64) >= TOTAL_LIMIT:
            raise SnapshotFormatError(f"{where}: its events have more bytes than 62 bits can count. Was it damaged?")
        return cls(actions=actions, addresses=addresses, sizes=sizes)


def unknown_actions(trace: DeviceTrace) -> dict[str, int]:
    """The number of events of each action that is neither replayed nor known to move no memory."""
    codes, names = trace.objects("action")
    counts: Counter[str] = Counter()
    for name, count in zip(names, np.bincount(codes, minlength=len(names)).tolist(), strict=True):
        if isinstance(name, str) and name not in ACTIONS and name not in _MARKS:
            counts[name] += count
    return counts


def _action(name: Any) -> int:
    if type(name) is not str:
        return -1
    return ACTIONS.index(name) if name in ACTIONS else _OTHER


def _numbers(trace: DeviceTrace, key: str, limit: int, where: str) -> Int64s:
    numbers = trace.numbers(key)
    if len(wrong := np.flatnonzero((numbers < 0) | (numbers >= limit))):
        value = trace[int(wrong[0])].get(key)
        raise SnapshotFormatError(f"{where}: {key} number {wrong[0]} is {short_repr(value)}. Was the file damaged?")
    return numbers
