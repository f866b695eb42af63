"""Explain a failed allocation: what was requested and held, why the free memory did not serve, what would have."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ligerprof.analyzers.attribution.blocks import Attribution
from ligerprof.analyzers.attribution.stacks import Stack, StackReader
from ligerprof.analyzers.explain.groups import BlockGroup, group_blocks
from ligerprof.analyzers.explain.steps import Growth, find_growth, repetitions, size_ratio
from ligerprof.roles import PASSES, MemoryBreakdown, Phase, Role
from ligerprof.serialization import select, to_json
from ligerprof.snapshots.segments import Piece, PoolId, Segment, pool_id, segments_at
from ligerprof.snapshots.stamp import Stamp
from ligerprof.snapshots.trace import integer_of
from ligerprof.torch_memory.allocator.caching import LARGE_SEGMENT_BYTES, segment_bytes
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
    """Reserved but unallocated bytes that did not serve a request for one reason."""

    reason: FreeReason
    size_bytes: int
    largest_bytes: int
    pieces: int

    def to_json(self) -> dict[str, Any]:
        """An entry of `free` in the JSON."""
        return select(self, "reason", "bytes=size_bytes", "largest_bytes", "pieces")


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedRequest:
    """A request for memory.

    Attributes:
        size_bytes: of the smallest block that serves it.
        stream: None if unknown.
        pool: None if unknown.
    """

    size_bytes: int
    stream: int | None
    pool: PoolId | None


def request_of(event: Mapping[str, Any], segments: Sequence[Segment], rules: SizeRules) -> FailedRequest:
    """The request of an out-of-memory event.

    Events of older torch lack the pool; it is then that of the newest block on the same stream.
    """
    size, stream = integer_of(event, "size"), integer_of(event, "stream")
    pool = pool_id(event.get("pool_id"))
    if pool is None:
        on_stream = (segment for segment in segments if segment.stream == stream and segment.blocks)
        newest = max(on_stream, key=lambda segment: max(segment.blocks), default=None)
        pool = None if newest is None else newest.pool
    return FailedRequest(size_bytes=0 if size is None else rules.round_request(size), stream=stream, pool=pool)


def free_memory(segments: Sequence[Segment], request: FailedRequest, rules: SizeRules) -> tuple[FreeMemory, ...]:
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


def _reasons(segment: Segment, request: FailedRequest, rules: SizeRules) -> Iterator[tuple[FreeReason, Piece]]:
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
        free_bytes = segment.free_bytes
        live = [held[block] for block in segment.blocks if block in held]
        if not free_bytes or not live:
            continue
        roles: dict[Role, int] = defaultdict(int)
        for role, size_bytes in live:
            roles[role] += size_bytes
        pins.append(PinnedSegment(segment_bytes=segment.size_bytes, free_bytes=free_bytes, roles=roles))
    return tuple(sorted(pins, key=lambda pin: -pin.free_bytes)[:most])


_MOST_SEGMENTS = 10
_MOST_FAILURES = 20
_MOST_GROWTHS = 20
# two steps that add equally much are enough to name what grew before a failure
_LEAST_STEPS = 2


class Cause(ExplainedWord):
    """Why the allocator could not get a new segment."""

    DEVICE = "device", "the device had too little left"
    LIMIT = "limit", "the device had enough left; a limit on this process was reached"
    UNKNOWN = "unknown", "the recording does not contain what the device had left"


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """One allocation that failed.

    Attributes:
        requested_bytes: 0 if the event does not contain it.
        phase: None if unknown.
        step: its number in the stamps, or without stamps counted from the first in the recording; None if unknown.
        caught: whether the program went on: a call site that had allocated before allocated again.
    """

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    phase: Phase | None
    step: int | None
    caught: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedAllocation(Failure):
    """The last allocation that did not fit, and the state of the device then.

    Attributes:
        module: dotted name of the module that ran, "" if unknown.
        frame: `file:line function` of the most informative call, or an autograd node, or "".
        operation: the torch operator, Python function or autograd node that requested memory, or "".
        frames: `file:line function` of the Python calls, innermost first.
        called_from: the line of the script that led there, "" if unknown.
        roles: add up to `allocated_bytes`, rounding included.
        blocks: largest first; their bytes add up to the roles without allocator_rounding.
        free: reserved but unallocated bytes by the reason why they did not serve.
        needed_bytes: the segment that the allocator asked the driver for.
        device_free_bytes: what the driver had left, None if the recording does not contain it.
        limit_bytes: the limit on this process's reserved bytes, None if unknown; recordings do not contain it.
        missing_bytes: how much more the driver or the limit would have had to give; None if unknown.
        missing_is_bound: whether `missing_bytes` is only an upper bound, as the limit itself is not recorded.
        pins: segments with free parts, the largest free part first.
        growth: call sites whose memory grew in the steps before, the fastest first.
        larger_than_before: how many times as large the forward pass's tensors are as in any step before.
        earlier: failures before this one, the newest first.
        earlier_count: number of all of them.
        held_as_much_before: whether the program had held that much and the request at once, so that only free memory
            in pieces stood in the way.
    """

    module: str
    frame: str
    operation: str
    frames: tuple[str, ...]
    called_from: str
    roles: MemoryBreakdown
    blocks: tuple[BlockGroup, ...]
    free: tuple[FreeMemory, ...]
    needed_bytes: int
    device_free_bytes: int | None
    missing_bytes: int | None
    missing_is_bound: bool
    pins: tuple[PinnedSegment, ...]
    expandable_segments: bool
    growth: tuple[Growth, ...]
    larger_than_before: float | None
    earlier: tuple[Failure, ...]
    earlier_count: int
    limit_bytes: int | None = None
    held_as_much_before: bool = False

    @property
    def reserved_free_bytes(self) -> int:
        """Reserved bytes that were in no allocated block."""
        return self.reserved_bytes - self.allocated_bytes

    @property
    def largest_free_bytes(self) -> int:
        """The largest contiguous piece of those."""
        return max((free.largest_bytes for free in self.free), default=0)

    @property
    def fragmented(self) -> bool:
        """Whether enough was free for this request, but only in smaller pieces."""
        small = [free.size_bytes for free in self.free if free.reason is FreeReason.TOO_SMALL]
        return any(size_bytes >= self.requested_bytes > 0 for size_bytes in small)

    @property
    def growth_per_step_bytes(self) -> int:
        """What all growing call sites add in a typical step."""
        return sum(growth.per_step_bytes for growth in self.growth)

    @property
    def cause(self) -> Cause:
        """Why the allocator could not get a new segment."""
        if self.limit_bytes is not None:
            return Cause.LIMIT
        if self.device_free_bytes is None:
            return Cause.UNKNOWN
        return Cause.LIMIT if self.device_free_bytes >= self.needed_bytes else Cause.DEVICE

    def under_limit(self, limit_bytes: int) -> "FailedAllocation":
        """The same failure with the limit on reserved bytes, unless the device had even less left."""
        over_bytes = self.reserved_bytes + self.needed_bytes - limit_bytes
        if over_bytes <= 0 or (self.cause is Cause.DEVICE and over_bytes < (self.missing_bytes or 0)):
            return self
        return replace(self, limit_bytes=limit_bytes, missing_bytes=over_bytes, missing_is_bound=False)

    def to_json(self) -> dict[str, Any]:
        """The object `oom` in the JSON."""
        return {
            **select(self, "requested_bytes", "allocated_bytes", "reserved_bytes", "phase", "step"),
            **select(self, "roles", "blocks", "module", "frame", "operation", "called_from", "frames", "caught"),
            **select(self, "reserved_free_bytes", "largest_free_bytes", "free", "fragmented", "pins"),
            **select(self, "why=cause", "device_free_bytes", "needed_bytes", "missing_bytes", "missing_is_bound"),
            "growth": to_json(self.growth[:_MOST_GROWTHS]),
            "growth_per_step_bytes": self.growth_per_step_bytes,
            **select(self, "larger_than_before", "earlier", "earlier_count"),
        }


def judge_failures(attribution: Attribution, *, stacks: bool = False) -> FailedAllocation | None:
    """Explain the last failed allocation of a recording; None if there is none.

    Blocks that were freed after it count as kept, since unwinding the exception frees most of them: a
    recording that was dumped then gives the same answer as one dumped by an out-of-memory observer.
    """
    failures = attribution.replayed.failures
    if not failures:
        return None
    index = failures[-1]
    then = attribution.until(index)
    owners = then.owners_at(index)
    replayed, event, rules = attribution.replayed, attribution.replayed.trace[index], attribution.replayed.rules
    segments, allocated = segments_at(replayed, index), replayed.allocated_bytes[: index + 1]
    request = request_of(event, segments, rules)
    held = {owner.block: (owner.role, owner.requested_bytes) for owner in owners}
    stack = StackReader().read(event.get("frames"))
    stamp = Stamp.parse(event.get("user_metadata"))
    device_free = integer_of(event, "device_free")
    needed_bytes = segment_bytes(request.size_bytes)
    missing_bytes, is_bound = _missing(attribution, index, needed_bytes, device_free)
    return FailedAllocation(
        **asdict(_failure(attribution, index)),
        module=stamp.module if stamp else "",
        frame=stack.description or (stamp.node if stamp else ""),
        operation=stack.operation or (stamp.node if stamp else ""),
        frames=tuple(f"{call.file}:{call.line} {call.function}" for call in stack.calls),
        called_from=stack.script_line,
        roles=then.breakdown(index, owners),
        blocks=group_blocks(owners, by_stack=stacks),
        free=free_memory(segments, request, rules),
        needed_bytes=needed_bytes,
        device_free_bytes=device_free,
        missing_bytes=missing_bytes,
        missing_is_bound=is_bound,
        pins=pinned_segments(segments, held, most=_MOST_SEGMENTS),
        expandable_segments=rules.expandable_segments,
        growth=find_growth(then, index, owners, least_steps=_LEAST_STEPS),
        larger_than_before=size_ratio(then, index),
        earlier=tuple(_failure(attribution, each) for each in failures[-2 : -2 - _MOST_FAILURES : -1]),
        earlier_count=len(failures) - 1,
        held_as_much_before=bool(allocated[-1] + request.size_bytes <= allocated.max()),
    )


def _missing(
    attribution: Attribution, index: int, needed_bytes: int, device_free_bytes: int | None
) -> tuple[int | None, bool]:
    """Bytes missing from the driver's memory or from a limit, and whether they are only an upper bound."""
    if device_free_bytes is None:
        return None, False
    if device_free_bytes < needed_bytes:
        return needed_bytes - device_free_bytes, False
    reserved = attribution.replayed.reserved_bytes
    # the limit is at least what was reserved before
    return int(reserved[index]) + needed_bytes - int(reserved[: index + 1].max()), True


def _failure(attribution: Attribution, index: int) -> Failure:
    replayed = attribution.replayed
    event = replayed.trace[index]
    stamp = Stamp.parse(event.get("user_metadata"))
    stack = StackReader().read(event.get("frames"))
    phase = attribution.phases.shown_at(index) if stamp else _phase(attribution, index, stack)
    allocated, places = replayed.allocated_by, attribution.call_sites.place_of
    return Failure(
        requested_bytes=integer_of(event, "size") or 0,
        allocated_bytes=int(replayed.allocated_bytes[index]),
        reserved_bytes=int(replayed.reserved_bytes[index]),
        phase=phase,
        step=stamp.step if stamp else _step(attribution, index, phase),
        caught=bool(np.isin(places[allocated > index], places[allocated < index]).any()),
    )


def _phase(attribution: Attribution, index: int, stack: Stack) -> Phase | None:
    """The phase of the failing call; its stack may be the first of a new phase."""
    if stack.calls or stack.native:
        return stack.phase
    # if only Python stacks were recorded, autograd's threads have none
    if any(site.stack.calls for site in attribution.call_sites.sites):
        return Phase.BACKWARD
    return attribution.phases.phase_at(index - 1)


def _step(attribution: Attribution, index: int, phase: Phase | None) -> int | None:
    """The number of the step, counted from the recording's first."""
    starts = repetitions(attribution, index)
    # the failing allocation may be the first of its step
    begins = phase is Phase.FORWARD and attribution.phases.phase_at(index - 1) not in PASSES
    return len(starts) + begins or None
