"""The events of a simulated GPU, in columns: Python's collector would visit millions of objects otherwise."""

import gc
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from ligerprof.snapshots.writer import EventContext, Frame, TraceEvent


class History:
    """The newest events.

    Args:
        limit: how many are kept; None: all.
        events: what there is so far.
    """

    def __init__(self, limit: int | None, events: Iterable[TraceEvent] = ()) -> None:
        self.limit = limit
        self._columns = tuple(deque[object](maxlen=limit) for _ in TraceEvent._fields)
        self._appends = tuple(column.append for column in self._columns)
        for event in events:
            self.append(*event)

    def append(
        self, action: str, address: int, size_bytes: int, context: EventContext, stream: int, time_us: int | None
    ) -> None:
        """Add an event, and drop the oldest if there are too many."""
        one, two, three, four, five, six = self._appends
        one(action)
        two(address)
        three(size_bytes)
        four(context)
        five(stream)
        six(time_us)

    def clear(self) -> None:
        """Drop all events."""
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
        """Those of the other context."""
        return self._other.frames
