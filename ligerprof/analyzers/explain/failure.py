"""Decide why an allocation failed: too much memory in use, or free memory in pieces that are too small."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ligerprof.analyzers.attribution.blocks import Owner
from ligerprof.roles import Role
from ligerprof.snapshots.replay import OutOfMemoryEvent, Replay
from ligerprof.snapshots.state import DeviceState

_MOST_SEGMENTS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class PinnedSegment:
    """A segment that cannot be released although part of it is free; `roles` are the requested bytes that pin it."""

    segment_bytes: int
    free_bytes: int
    roles: Mapping[Role, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedAllocation:
    """The first allocation that did not fit.

    Attributes:
        reserved_free_bytes: reserved bytes that were in no allocated block.
        largest_free_bytes: the largest contiguous piece of those.
        device_free_bytes: what the driver had left, None if the recording does not contain it.
        fragmented: whether enough was reserved and free, but only in smaller pieces.
        pins: segments with free parts, the largest free part first.
    """

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    reserved_free_bytes: int
    largest_free_bytes: int
    device_free_bytes: int | None
    fragmented: bool
    pins: tuple[PinnedSegment, ...]


def judge_failure(replayed: Replay, oom: OutOfMemoryEvent, owners: Sequence[Owner]) -> FailedAllocation:
    """Judge the device's state at an out-of-memory event; `owners` are those of the blocks that were live then."""
    free = oom.state.space.starts.values()
    free_bytes, largest = sum(free), max(free, default=0)
    return FailedAllocation(
        requested_bytes=oom.requested_bytes,
        allocated_bytes=int(replayed.allocated_bytes[oom.index]),
        reserved_bytes=int(replayed.reserved_bytes[oom.index]),
        reserved_free_bytes=free_bytes,
        largest_free_bytes=largest,
        device_free_bytes=oom.device_free_bytes,
        fragmented=largest < oom.requested_bytes <= free_bytes,
        pins=_pinned_segments(replayed, oom.state, owners),
    )


def _pinned_segments(replayed: Replay, state: DeviceState, owners: Sequence[Owner]) -> tuple[PinnedSegment, ...]:
    owner_at = {_address(replayed, owner.block): owner for owner in owners}
    pins = []
    for pieces in _segments(state):
        free_bytes = sum(size for address, size in pieces if address in state.space.starts)
        live = [owner_at[address] for address, _ in pieces if address in owner_at]
        if not free_bytes or not live:
            continue
        roles: dict[Role, int] = defaultdict(int)
        for owner in live:
            roles[owner.role] += owner.requested_bytes
        segment_bytes = sum(size for _, size in pieces)
        pins.append(PinnedSegment(segment_bytes=segment_bytes, free_bytes=free_bytes, roles=roles))
    return tuple(sorted(pins, key=lambda pin: -pin.free_bytes)[:_MOST_SEGMENTS])


def _segments(state: DeviceState) -> list[list[tuple[int, int]]]:
    """Address and size of all blocks, free ones too, segment by segment."""
    held = [(address, block.block_bytes) for address, block in state.blocks.items()]
    segments: list[list[tuple[int, int]]] = []
    end = -1
    for address, size in sorted([*held, *state.space.starts.items()]):
        if address != end or address in state.space.borders:
            segments.append([])
        segments[-1].append((address, size))
        end = address + size
    return segments


def _address(replayed: Replay, block: int) -> int:
    event = int(replayed.allocated_by[block])
    return int(replayed.trace[event]["addr"]) if event >= 0 else replayed.older_blocks[block].address
