"""A device's events as checked columns of actions, addresses and sizes, the input of replay and rewind."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ligerprof.errors import SnapshotFormatError
from ligerprof.snapshots.trace import DeviceTrace, Int64s

# virtual addresses have at most 57 bits, and no device has 16 TiB
ADDRESS_LIMIT = 2**62
SIZE_LIMIT = 2**44

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
            SnapshotFormatError: an event lacks `action`, or its address or size is not a number in range.
        """
        codes, names = trace.objects("action")
        actions = np.array([_action(name) for name in names], dtype=np.int64)[codes]
        if len(nameless := np.flatnonzero(actions < 0)):
            raise SnapshotFormatError(f"{where}: event {nameless[0]} has no action. Was the file damaged?")
        return cls(
            actions=actions,
            addresses=_numbers(trace, "addr", ADDRESS_LIMIT, where),
            sizes=_numbers(trace, "size", SIZE_LIMIT, where),
        )


def _action(name: Any) -> int:
    if type(name) is not str:
        return -1
    return ACTIONS.index(name) if name in ACTIONS else _OTHER


def _numbers(trace: DeviceTrace, key: str, limit: int, where: str) -> Int64s:
    numbers = trace.numbers(key)
    if len(wrong := np.flatnonzero((numbers < 0) | (numbers >= limit))):
        value = trace[int(wrong[0])].get(key)
        raise SnapshotFormatError(f"{where}: {key} number {wrong[0]} is {value!r:.40}. Was the file damaged?")
    return numbers
