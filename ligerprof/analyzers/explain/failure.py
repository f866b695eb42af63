"""Decide why an allocation failed: too much memory in use, or free memory in pieces that are too small."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ligerprof.analyzers.attribution.blocks import Owner
from ligerprof.roles import Role
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.segments import Segment, segments_at

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


def judge_failure(replayed: Replay, index: int, owners: Sequence[Owner]) -> FailedAllocation:
    """Judge the device's state at the out-of-memory event `index`; `owners` are those of the blocks live then."""
    event, segments = replayed.trace[index], segments_at(replayed, index)
    requested, device_free = event.get("size"), event.get("device_free")
    requested_bytes = requested if type(requested) is int else 0
    free = [piece.size_bytes for segment in segments for piece in segment.free]
    return FailedAllocation(
        requested_bytes=requested_bytes,
        allocated_bytes=int(replayed.allocated_bytes[index]),
        reserved_bytes=int(replayed.reserved_bytes[index]),
        reserved_free_bytes=sum(free),
        largest_free_bytes=max(free, default=0),
        device_free_bytes=device_free if type(device_free) is int else None,
        fragmented=max(free, default=0) < requested_bytes <= sum(free),
        pins=_pinned_segments(segments, owners),
    )


def _pinned_segments(segments: Sequence[Segment], owners: Sequence[Owner]) -> tuple[PinnedSegment, ...]:
    owner_of = {owner.block: owner for owner in owners}
    pins = []
    for segment in segments:
        free_bytes = sum(piece.size_bytes for piece in segment.free)
        live = [owner_of[block] for block in segment.blocks if block in owner_of]
        if not free_bytes or not live:
            continue
        roles: dict[Role, int] = defaultdict(int)
        for owner in live:
            roles[owner.role] += owner.requested_bytes
        pins.append(PinnedSegment(segment_bytes=segment.size_bytes, free_bytes=free_bytes, roles=roles))
    return tuple(sorted(pins, key=lambda pin: -pin.free_bytes)[:_MOST_SEGMENTS])
