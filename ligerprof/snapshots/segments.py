"""Rebuild a device's segments at one moment: the blocks in each, and the free pieces between them."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.state import HeldBlock
from ligerprof.snapshots.trace import GROWS, SHRINKS, Action, EventColumns, Int64s, integer_of
from ligerprof.torch_memory.allocator.caching import SMALL_SEGMENT_BYTES

_WAITS = -1

# the pool of a CUDA graph; (0, 0) is the default pool
PoolId = tuple[int, int]
DEFAULT_POOL: PoolId = (0, 0)


class Piece(NamedTuple):
    """A part of a segment."""

    address: int
    size_bytes: int


def _pieces(addresses: Int64s, sizes: Int64s) -> tuple[Piece, ...]:
    return tuple(map(Piece, addresses.tolist(), sizes.tolist()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A contiguous range of memory from the driver, with one stream and one pool.

    Attributes:
        stream: None if the recording does not contain it.
        pool: None if the recording does not contain it, as for a segment that was released later.
        small: whether it serves only requests of up to 1 MiB; the allocator keeps these apart.
        blocks: indices in the replay of the blocks that are allocated.
        waiting: blocks that were freed but wait for work on another stream.
        free: the other pieces.
    """

    address: int
    size_bytes: int
    stream: int | None
    pool: PoolId | None
    small: bool
    blocks: tuple[int, ...]
    waiting: tuple[Piece, ...]
    free: tuple[Piece, ...]

    @property
    def free_bytes(self) -> int:
        """Bytes of the free pieces."""
        return sum(piece.size_bytes for piece in self.free)


class _Kind(NamedTuple):
    stream: int | None
    pool: PoolId | None
    small: bool
    expandable: bool


class _Range(NamedTuple):
    end: int
    kind: _Kind


def segments_at(replayed: Replay, moment: int) -> tuple[Segment, ...]:
    """The segments of a device at a moment, by address.

    A recording that starts with an empty device is followed from its start, any other backwards from
    the segments in the file.
    """
    where = f"{replayed.source}: device {replayed.device}"
    columns = EventColumns.of(replayed.trace, where)
    ranges = _ranges_at(replayed, columns, moment)
    held = _held_blocks(replayed, columns, moment)
    return tuple(_segments(ranges, held))


def _ranges_at(replayed: Replay, columns: EventColumns, moment: int) -> dict[int, _Range]:
    moves = np.flatnonzero(np.isin(columns.actions, GROWS + SHRINKS))
    before, after = moves[moves < moment].tolist(), moves[moves >= moment].tolist()
    at_end = _Ranges()
    for segment in replayed.segments:
        at_end.add(segment.get("address", 0), segment.get("total_size", 0), _kind_of_segment(segment))
    if replayed.complete:
        found = _Ranges()
        for index in before:
            found.apply(replayed.trace[index], columns, index, undo=False)
        _keep_known_kinds(found, at_end, [replayed.trace[index] for index in after])
        return found.ranges
    for index in reversed(after):
        at_end.apply(replayed.trace[index], columns, index, undo=True)
    return at_end.ranges


def _keep_known_kinds(found: "_Ranges", at_end: "_Ranges", later: Sequence[Mapping[str, Any]]) -> None:
    """Take stream and pool of the ranges that last to the end from the file, which knows the pools."""
    gone = {event.get("addr") for event in later}
    for start, known in list(found.ranges.items()):
        last = at_end.around(start)
        if last is not None and start not in gone:
            found.ranges[start] = _Range(known.end, at_end.ranges[last].kind)


class _Ranges:
    """Ranges of memory by start address; adjacent ranges of one expandable segment are merged."""

    def __init__(self) -> None:
        self.ranges: dict[int, _Range] = {}
        self._starts: list[int] = []

    def apply(self, event: Mapping[str, Any], columns: EventColumns, index: int, *, undo: bool) -> None:
        """Apply an event of a segment, or undo it."""
        action, start, size = (int(column[index]) for column in (columns.actions, columns.addresses, columns.sizes))
        if (action in GROWS) != undo:
            is_expandable = action in (Action.SEGMENT_MAP, Action.SEGMENT_UNMAP)
            self.add(start, size, _kind_of_event(event, size, expandable=is_expandable))
        else:
            self.remove(start, start + size)

    def around(self, address: int) -> int | None:
        """Start of the range that contains an address."""
        at = bisect_right(self._starts, address) - 1
        return self._starts[at] if at >= 0 and address < self.ranges[self._starts[at]].end else None

    def add(self, start: int, size: int, kind: _Kind) -> None:
        """Add a range; it must not overlap others, and an empty one is left out."""
        if size <= 0:
            return
        end = start + size
        if kind.expandable:
            left, right = self.around(start - 1), self.ranges.get(end)
            if right is not None and right.kind.expandable:
                self._drop(end)
                end = right.end
            if left is not None and self.ranges[left].kind.expandable:
                start, kind = left, self.ranges[left].kind
                self._drop(left)
        self._put(start, end, kind)

    def remove(self, start: int, end: int) -> None:
        """Cut a range out of the one that contains it; nothing happens if none does."""
        holder = self.around(start)
        if holder is None or self.ranges[holder].end < end:
            return
        last, kind = self.ranges[holder]
        self._drop(holder)
        if holder < start:
            self._put(holder, start, kind)
        if end < last:
            self._put(end, last, kind)

    def _put(self, start: int, end: int, kind: _Kind) -> None:
        if start not in self.ranges:
            self._starts.insert(bisect_right(self._starts, start), start)
        self.ranges[start] = _Range(end, kind)

    def _drop(self, start: int) -> None:
        del self.ranges[start]
        del self._starts[bisect_right(self._starts, start) - 1]


def _kind_of_segment(segment: Mapping[str, Any]) -> _Kind:
    return _Kind(
        stream=integer_of(segment, "stream"),
        pool=pool_id(segment.get("segment_pool_id", DEFAULT_POOL)),
        small=segment.get("segment_type") == "small",
        expandable=segment.get("is_expandable") is True,
    )


def _kind_of_event(event: Mapping[str, Any], size: int, *, expandable: bool) -> _Kind:
    return _Kind(
        stream=integer_of(event, "stream"),
        pool=pool_id(event.get("pool_id")),
        small=size <= SMALL_SEGMENT_BYTES,
        expandable=expandable,
    )


def pool_id(value: Any) -> PoolId | None:
    """A pool as in the file; None if it is not a pair of integers."""
    if isinstance(value, (tuple, list)) and len(value) == 2 and all(type(each) is int for each in value):
        return value[0], value[1]
    return None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Held:
    """The blocks that are not free at a moment, by address; the index of one that waits for another stream is -1."""

    addresses: Int64s
    sizes: Int64s
    blocks: Int64s

    def between(self, start: int, end: int) -> "_Held":
        """The blocks that start in a range of addresses."""
        first, stop = np.searchsorted(self.addresses, (start, end)).tolist()
        return _Held(addresses=self.addresses[first:stop], sizes=self.sizes[first:stop], blocks=self.blocks[first:stop])

    @property
    def allocated(self) -> tuple[int, ...]:
        return tuple(self.blocks[self.blocks != _WAITS].tolist())

    @property
    def waiting(self) -> tuple[Piece, ...]:
        waits = self.blocks == _WAITS
        return _pieces(self.addresses[waits], self.sizes[waits])

    def gaps(self, start: int, end: int) -> tuple[Piece, ...]:
        """The pieces of a range that no block covers."""
        starts = np.maximum.accumulate(np.append(start, self.addresses + self.sizes))
        sizes = np.append(self.addresses, end) - starts
        return _pieces(starts[sizes > 0], sizes[sizes > 0])


def _held_blocks(replayed: Replay, columns: EventColumns, moment: int) -> _Held:
    live, (freed, older) = replayed.live_at(moment), _waiting_blocks(replayed, columns, moment)
    of_trace = np.append(live, freed)
    addresses = np.append(replayed.addresses_of(of_trace), [block.address for block in older]).astype(np.int64)
    sizes = np.append(replayed.block_bytes[of_trace], [block.block_bytes for block in older]).astype(np.int64)
    blocks = np.append(live, np.full(len(freed) + len(older), _WAITS))
    order = np.lexsort((blocks, sizes, addresses))
    return _Held(addresses=addresses[order], sizes=sizes[order], blocks=blocks[order])


def _waiting_blocks(replayed: Replay, columns: EventColumns, moment: int) -> tuple[Int64s, list[HeldBlock]]:
    """Blocks whose release was requested before a moment and completed later or never: of the trace, and older."""
    actions, addresses = columns.actions[:moment], columns.addresses[:moment]
    frees = np.flatnonzero((actions == Action.FREE_REQUESTED) | (actions == Action.FREE_COMPLETED))
    # the last such event of each address
    touched, last = np.unique(addresses[frees][::-1], return_index=True)
    ends = frees[len(frees) - 1 - last]
    requests = ends[actions[ends] == Action.FREE_REQUESTED]
    known = set(touched.tolist()) if replayed.older_waiting else set()
    older = [block for block in replayed.older_waiting if block.address not in known]
    return np.flatnonzero(np.isin(replayed.freed_by, requests)), older


def _segments(ranges: Mapping[int, _Range], held: _Held) -> Iterator[Segment]:
    for start in sorted(ranges):
        end, kind = ranges[start]
        inside = held.between(start, end)
        yield Segment(
            address=start,
            size_bytes=end - start,
            stream=kind.stream,
            pool=kind.pool,
            small=kind.small,
            blocks=inside.allocated,
            waiting=inside.waiting,
            free=inside.gaps(start, end),
        )
