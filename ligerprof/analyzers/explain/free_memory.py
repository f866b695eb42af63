"""Decide why the reserved memory that was free did not serve a request."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ligerprof.roles import Role
from ligerprof.serialization import select
from ligerprof.snapshots.segments import Piece, PoolId, Segment, pool_id
from ligerprof.torch_memory.allocator.caching import LARGE_SEGMENT_BYTES
from ligerprof.torch_memory.allocator.settings import SMALL_REQUEST_BYTES, SizeRules
from ligerprof.words import ExplainedWord


class FreeReason(ExplainedWord):
    """Where free memory was that did not serve a request; each piece has the first reason that applies."""

    WAITING = "waiting", "freed, but waiting for work on another stream"
    PRIVATE_POOL = "private_pool", "in another pool, such as a CUDA graph's"
    OTHER_STREAM = "other_stream", "in segments of another stream"
    SMALL_SEGMENTS = "small_segments", "in segments for requests of up to 1 MiB"
    LARGE_SEGMENTS = "large_segments", "in segments for requests of more than 1 MiB"
    TOO_SMALL = "too_small", "in pieces smaller than the request"
    NOT_SPLIT = "not_split", "in pieces that max_split_size keeps whole"
    LARGE_ENOUGH = "large_enough", "in pieces that are large enough; the recording does not show why they were not used"


@dataclass(frozen=True, kw_only=True, slots=True)
class FreeMemory:
    """Reserved but unallocated bytes that did not serve a request for one reason.

    Attributes:
        largest_bytes: the largest contiguous piece.
        pieces: number of pieces.
    """

    reason: FreeReason
    size_bytes: int
    largest_bytes: int
    pieces: int

    def to_json(self) -> dict[str, Any]:
        """An entry of `free` in the JSON."""
        return select(self, "reason", "bytes=size_bytes", "largest_bytes", "pieces")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request for memory.

    Attributes:
        size_bytes: of the smallest block that serves it.
        stream: None if unknown.
        pool: None if unknown.
    """

    size_bytes: int
    stream: int | None
    pool: PoolId | None


def request_of(event: Mapping[str, Any], segments: Sequence[Segment], rules: SizeRules) -> Request:
    """The request of an out-of-memory event.

    Events of older torch lack the pool; it is then that of the newest block on the same stream.
    """
    size, stream = event.get("size"), event.get("stream")
    stream = stream if type(stream) is int else None
    pool = pool_id(event.get("pool_id"))
    if pool is None:
        newest = max((segment for segment in segments if segment.stream == stream), key=_newest_block, default=None)
        pool = newest.pool if newest is not None and newest.blocks else None
    return Request(size_bytes=rules.round_request(size) if type(size) is int else 0, stream=stream, pool=pool)


def _newest_block(segment: Segment) -> int:
    return max(segment.blocks, default=-1)


def free_memory(segments: Sequence[Segment], request: Request, rules: SizeRules) -> tuple[FreeMemory, ...]:
    """All free pieces by the reason why they did not serve a request, most bytes first."""
    pieces: dict[FreeReason, list[int]] = defaultdict(list)
    for segment in segments:
        for reason, piece in _reasons(segment, request, rules):
            pieces[reason].append(piece.size_bytes)
    found = [
        FreeMemory(reason=reason, size_bytes=sum(sizes), largest_bytes=max(sizes), pieces=len(sizes))
        for reason, sizes in pieces.items()
    ]
    return tuple(sorted(found, key=lambda free: -free.size_bytes))


def _reasons(segment: Segment, request: Request, rules: SizeRules) -> Iterator[tuple[FreeReason, Piece]]:
    elsewhere = None
    if None not in (segment.pool, request.pool) and segment.pool != request.pool:
        elsewhere = FreeReason.PRIVATE_POOL
    elif None not in (segment.stream, request.stream) and segment.stream != request.stream:
        elsewhere = FreeReason.OTHER_STREAM
    elif segment.small != (request.size_bytes <= SMALL_REQUEST_BYTES):
        elsewhere = FreeReason.SMALL_SEGMENTS if segment.small else FreeReason.LARGE_SEGMENTS
    for piece in segment.waiting:
        yield FreeReason.WAITING, piece
    for piece in segment.free:
        if elsewhere is not None:
            yield elsewhere, piece
        elif piece.size_bytes < request.size_bytes:
            yield FreeReason.TOO_SMALL, piece
        elif _must_stay_whole(piece.size_bytes, request.size_bytes, rules.max_split_bytes):
            yield FreeReason.NOT_SPLIT, piece
        else:
            yield FreeReason.LARGE_ENOUGH, piece


def _must_stay_whole(free_bytes: int, block_bytes: int, max_split_bytes: int | None) -> bool:
    """Whether max_split_size keeps a free block from a smaller request (get_free_block in CUDACachingAllocator.cpp)."""
    if max_split_bytes is None or free_bytes < max_split_bytes:
        return False
    return block_bytes < max_split_bytes or free_bytes >= block_bytes + LARGE_SEGMENT_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class PinnedSegment:
    """A segment that cannot be released although part of it is free; `roles` are the requested bytes that pin it."""

    segment_bytes: int
    free_bytes: int
    roles: Mapping[Role, int]


def pinned_segments(
    segments: Sequence[Segment], held: Mapping[int, tuple[Role, int]], *, most: int
) -> tuple[PinnedSegment, ...]:
    """Segments with blocks and free parts, the largest free part first; `held` has role and bytes of each block."""
    pins = []
    for segment in segments:
        free_bytes = segment.free.total_bytes
        live = [held[block] for block in segment.blocks if block in held]
        if not free_bytes or not live:
            continue
        roles: dict[Role, int] = defaultdict(int)
        for role, size_bytes in live:
            roles[role] += size_bytes
        pins.append(PinnedSegment(segment_bytes=segment.size_bytes, free_bytes=free_bytes, roles=roles))
    return tuple(sorted(pins, key=lambda pin: -pin.free_bytes)[:most])
