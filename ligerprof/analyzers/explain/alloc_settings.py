"""What a recording would have reserved under other settings of the allocator, found by replaying its requests.

Each request and each release goes through the model of torch's allocator, in order and on its stream, under one
PYTORCH_CUDA_ALLOC_CONF after another. Under the recording's own settings this has to give what was recorded; where it
does not, nothing is said about others.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ligerprof.analyzers.explain.failure import FailedAllocation
from ligerprof.analyzers.suggestions.case import Framework
from ligerprof.analyzers.suggestions.rows import Cost, Suggestion
from ligerprof.errors import LigerprofError
from ligerprof.serialization import select
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.trace import GROWS, SHRINKS, Action, EventColumns, Flags, Int64s, integer_of
from ligerprof.torch_memory.allocator.caching import (
    LARGE_SEGMENT_BYTES,
    AllocatorFullError,
    CachingAllocator,
    segment_bytes,
)
from ligerprof.torch_memory.allocator.settings import SizeRules, parse_allocator_settings
from ligerprof.units import MIB

# keys, and values worth trying; None leaves a key out, which is torch's default
_VALUES: Mapping[str, tuple[str | None, ...]] = {
    "expandable_segments": ("True", None),
    "roundup_power2_divisions": ("8", "4", "16", "2", None),
    "max_split_size_mb": ("128", "512", "64", "256", "32", None),
    # torch collects garbage only under a limit on the process
    "garbage_collection_threshold": ("0.8", "0.6"),
}
_GARBAGE = "garbage_collection_threshold"
# a smaller gain is not worth another key, and a replay that is further off misses something
_LEAST_GAIN = _LARGEST_DIFFERENCE = 0.01
# a smaller part of the reserved bytes is not worth a change of the settings
_WORTHWHILE = 0.05
# of all replays that nobody asked for: about a second
_MOST_EVENTS = 600_000
# a search by halves takes ten replays
_MOST_LIMITS = 3
_UP_TO_FAILURE = "Replayed up to the failure: what comes after it is not recorded"
_DEPENDS = {True: "", None: ". Whether this is enough depends on the limit of the process, which is not recorded"}
_GROWS = ". What grows from step to step fills this, too"
_ALLOCATE, _FREE, _EMPTY_CACHE, _OTHER = range(4)

Conf = Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingsOutcome:
    """What a recording does under some settings.

    Attributes:
        conf: value by key.
        allocated_bytes: the highest; it depends on how sizes are rounded.
        reserved_bytes: the highest; without the recorded limit, if a request fails under it.
        saves_bytes: how much more the recording's own settings reserve; negative if less.
        retries: how often cached memory was given back to make room under the recorded limit.
        fits: whether the allocation that failed in the recording succeeds; None if none failed, or if that depends on
            the limit, of which a recording then shows two bounds.
        smallest_limit_bytes: a limit on reserved bytes under which all requests succeed, while they do not under one
            large segment less (under much less they may again); None if it was not searched: for the best few and the
            recording's own.
    """

    conf: Conf
    allocated_bytes: int
    reserved_bytes: int
    saves_bytes: int
    retries: int
    fits: bool | None
    smallest_limit_bytes: int | None = None

    @property
    def alloc_conf(self) -> str:
        """The value of PYTORCH_CUDA_ALLOC_CONF, "" for torch's defaults."""
        return _text(self.conf)

    @property
    def helps(self) -> bool:
        """Whether the settings let the failed allocation succeed, or reserve noticeably less."""
        before_bytes = self.reserved_bytes + self.saves_bytes
        return bool(self.fits) or (self.fits is None and self.saves_bytes >= _WORTHWHILE * before_bytes)

    def to_json(self) -> dict[str, Any]:
        """An entry of `alloc_confs` in the JSON."""
        names = ("alloc_conf", "reserved_bytes", "saves_bytes", "retries", "fits", "allocated_bytes")
        return select(self, *names, "smallest_limit_bytes")


def other_settings(replayed: Replay, *, thorough: bool = False) -> tuple[SettingsOutcome, ...] | None:
    """The recording's own settings and others, best first; () if no settings can help much.

    Args:
        replayed: one device's recording. One that failed is replayed up to its last failure. Calls of empty_cache()
            that gave nothing back left no event, so they are not replayed.
        thorough: also search where little can be gained or the recording is long, and find each smallest limit.

    Returns:
        None if the recording cannot be replayed under other settings: it does not start with an empty device, has pools
        of its own (CUDA graphs, MemPool), or its own settings do not give what was recorded.
    """
    if not replayed.complete or replayed.mismatches or not len(replayed.trace) or _has_own_pools(replayed):
        return None
    if not thorough and not replayed.failures:
        # most recordings end here, before their events are read again
        reserved_bytes = int(replayed.reserved_bytes.max())
        if reserved_bytes - int(replayed.allocated_bytes.max()) < _WORTHWHILE * reserved_bytes:
            return ()
    requests = Requests(replayed)
    if not thorough and len(requests.steps) > _MOST_EVENTS:
        return ()
    return _search(requests, thorough=thorough)


def best_settings(tried: Sequence[SettingsOutcome] | None) -> SettingsOutcome | None:
    """The settings to advise: of those that help, the fewest keys that come close to the best; None if none helps."""
    helpful = [one for one in tried or () if one.helps]
    close = [
        one
        for one in helpful
        if one.retries == helpful[0].retries and one.reserved_bytes <= (1 + _LEAST_GAIN) * helpful[0].reserved_bytes
    ]
    return min(close, key=lambda one: len(one.conf), default=None)


def with_settings(
    suggestions: Sequence[Suggestion], tried: Sequence[SettingsOutcome] | None, failed: FailedAllocation | None
) -> tuple[Suggestion, ...]:
    """Suggestions with one for the best settings, after those that are free.

    It comes first where the settings let a failed allocation pass in a program that had already held as much at once.
    Elsewhere more may follow than what failed, and a change that lets it pass by lowering the peak comes before it.
    """
    best = best_settings(tried)
    if best is None:
        return tuple(suggestions)
    own = Suggestion(
        name="alloc-conf",
        change="other settings of torch's allocator, which lose less memory between blocks",
        without=(),
        saves_bytes=None,
        new_peak_bytes=None,
        cost=Cost.FREE,
        cost_reason="the same results; set in the environment, before the program starts",
        how=(f"export PYTORCH_CUDA_ALLOC_CONF={best.alloc_conf}",),
        framework=Framework.TORCH,
        lets_pass=best.fits,
        condition="" if failed is None else _UP_TO_FAILURE + (_GROWS if failed.growth else _DEPENDS[best.fits]),
        new_reserved_bytes=best.reserved_bytes,
        saves_reserved_bytes=best.saves_bytes,
    )
    is_first = bool(best.fits) and failed is not None and not failed.growth and failed.held_as_much_before
    free = sum(one.cost is Cost.FREE for one in suggestions)
    lets_pass = next((number for number, one in enumerate(suggestions, 1) if one.lets_pass), 0)
    place = 0 if is_first else max(free, 0 if failed is None else lets_pass)
    return (*suggestions[:place], own, *suggestions[place:])


def _search(requests: "Requests", *, thorough: bool) -> tuple[SettingsOutcome, ...] | None:
    """Change one key at a time, and keep the change that helps most, until none helps."""
    own = _conf_of(requests.until.rules)
    try:
        best = first = requests.outcome(own)
    except LigerprofError:
        # settings that torch would not have taken
        return None
    if not requests.is_recorded(first):
        return None
    found = {first.alloc_conf: first}
    left, improves = _MOST_EVENTS, True
    while improves:
        improves, base = False, best
        for conf in _neighbours(base.conf, collects=requests.limit_bytes is not None):
            left -= len(requests.steps)
            if _text(conf) in found or (left < 0 and not thorough):
                continue
            one = found[_text(conf)] = requests.outcome(conf)
            if _is_better(one, best):
                best, improves = one, True
    tried = [replace(one, saves_bytes=first.reserved_bytes - one.reserved_bytes) for one in found.values()]
    tried.sort(key=lambda one: (*_rank(one), one.reserved_bytes, len(one.alloc_conf)))
    if not thorough:
        return tuple(tried)
    limited = {_text(own), *(one.alloc_conf for one in tried[:_MOST_LIMITS])}
    return tuple(requests.with_smallest_limit(one) if one.alloc_conf in limited else one for one in tried)


def _is_better(one: SettingsOutcome, other: SettingsOutcome) -> bool:
    if _rank(one) != _rank(other):
        return _rank(one) < _rank(other)
    return one.reserved_bytes < (1 - _LEAST_GAIN) * other.reserved_bytes


def _rank(one: SettingsOutcome) -> tuple[int, int]:
    """Lower for settings that let the failed allocation succeed, then for those that may, then for fewer retries."""
    return (True, None, False).index(one.fits), one.retries


def _neighbours(conf: Conf, *, collects: bool) -> Iterator[Conf]:
    for key, values in _VALUES.items():
        if key == _GARBAGE and not collects:
            continue
        others = {other: value for other, value in conf.items() if other != key}
        yield from (others if value is None else {**others, key: value} for value in values if conf.get(key) != value)


def _text(conf: Conf) -> str:
    return ",".join(f"{key}:{conf[key]}" for key in _VALUES if key in conf)


def _conf_of(rules: SizeRules) -> Conf:
    """The settings that give some rules."""
    conf = {"expandable_segments": "True"} if rules.expandable_segments else {}
    if rules.max_split_bytes is not None:
        conf["max_split_size_mb"] = str(rules.max_split_bytes // MIB)
    if len(set(rules.roundup_divisions)) == 1:
        conf["roundup_power2_divisions"] = str(rules.roundup_divisions[0])
    elif rules.roundup_divisions:
        sizes = ",".join(f"{2**power}:{divisions}" for power, divisions in enumerate(rules.roundup_divisions))
        conf["roundup_power2_divisions"] = f"[{sizes}]"
    return conf


def _has_own_pools(replayed: Replay) -> bool:
    """Whether a segment is in a pool that a program made, such as a CUDA graph's."""
    pools = (*replayed.trace.objects("pool_id")[1], *(segment.get("segment_pool_id") for segment in replayed.segments))
    return any(isinstance(pool, (tuple, list)) and any(pool) for pool in pools)


class Requests:
    """What a recording asked of the allocator up to its last failure.

    Attributes:
        until: the recording, up to there.
        steps: kind, address, bytes and stream of each request, release and call of empty_cache().
        recorded_bytes: the highest reserved bytes.
        failed_bytes: what the allocation that failed asked for, None if none failed.
        limit_bytes: what the process could reserve at least, None if nothing in the recording met a limit.
    """

    def __init__(self, replayed: Replay) -> None:
        failed = replayed.failures[-1] if replayed.failures else None
        event = {} if failed is None else replayed.trace[failed]
        self.until = replayed if failed is None else replayed.until(failed)
        self.recorded_bytes = int(self.until.reserved_bytes.max())
        self.failed_bytes = None if failed is None else max(integer_of(event, "size") or 0, 1)
        self._failed_stream = integer_of(event, "stream") or 0
        columns = EventColumns.of(replayed.trace, replayed.source)
        stacks = replayed.trace.objects("frames")[0]
        count = len(self.until.trace)
        given_back = _given_back_within_requests(columns.actions, stacks)
        self.limit_bytes = self._highest_limit_bytes = None
        if self.failed_bytes is not None:
            reserved_bytes = int(self.until.reserved_bytes[-1])
            needed_bytes = segment_bytes(self.until.rules.round_request(self.failed_bytes))
            left_bytes = integer_of(event, "device_free") or 0
            if left_bytes < needed_bytes:
                self.limit_bytes = self._highest_limit_bytes = reserved_bytes + left_bytes
            else:
                # a limit on the process was reached, which recordings do not contain
                self.limit_bytes, self._highest_limit_bytes = self.recorded_bytes, reserved_bytes + needed_bytes - 1
        elif given_back[:count].any():
            self.limit_bytes = self.recorded_bytes
        self.steps = _steps(columns, replayed.trace.numbers("stream"), given_back, count)

    def outcome(self, conf: Conf) -> SettingsOutcome:
        """What the requests reserve, and whether they succeed under the recorded limit."""
        allocator, passed = self._run(conf, self.limit_bytes)
        retries = allocator.retries
        fits: bool | None = passed
        if self.failed_bytes is None or (not passed and self._run(conf, self._highest_limit_bytes)[1]):
            fits = None
        if not passed:
            allocator, _ = self._run(conf, None)
        return SettingsOutcome(
            conf=conf,
            allocated_bytes=allocator.highest_allocated_bytes,
            reserved_bytes=allocator.highest_reserved_bytes,
            saves_bytes=0,
            retries=retries,
            fits=fits,
        )

    def is_recorded(self, own: SettingsOutcome) -> bool:
        """Whether the outcome of the recording's own settings is what was recorded."""
        if self.failed_bytes is not None:
            return own.fits is False
        return abs(own.reserved_bytes - self.recorded_bytes) <= _LARGEST_DIFFERENCE * self.recorded_bytes

    def with_smallest_limit(self, one: SettingsOutcome) -> SettingsOutcome:
        """The same outcome with its smallest limit."""
        unit = LARGE_SEGMENT_BYTES
        # without a limit all requests succeed, within what is then reserved
        low, high = one.allocated_bytes // unit - 1, -(-self._run(one.conf, None)[0].highest_reserved_bytes // unit)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._run(one.conf, middle * unit)[1] else (middle, high)
        return replace(one, smallest_limit_bytes=high * unit)

    def _run(self, conf: Conf, limit_bytes: int | None) -> tuple[CachingAllocator, bool]:
        """The allocator after the requests, and whether all succeeded, the one that failed in the recording, too."""
        allocator = CachingAllocator(settings=parse_allocator_settings(_text(conf)), limit_bytes=limit_bytes)
        held = {}
        try:
            for kind, address, size_bytes, stream in self.steps:
                if kind == _ALLOCATE:
                    held[address] = allocator.malloc(size_bytes, stream=stream)
                elif kind == _FREE:
                    allocator.free(held.pop(address))
                else:
                    allocator.empty_cache()
            if self.failed_bytes is not None:
                allocator.malloc(self.failed_bytes, stream=self._failed_stream)
        except AllocatorFullError:
            return allocator, False
        return allocator, True


def _given_back_within_requests(actions: Int64s, stacks: Int64s) -> Flags:
    """Whether each event gives a segment back to make room for a request, and not for a call of empty_cache().

    Such releases come right before the new segment, or the failure, and have the request's stack.
    """
    releases = np.isin(actions, SHRINKS)
    others = np.append(np.flatnonzero(~releases), len(actions))
    after = others[np.searchsorted(others, np.arange(len(actions)))]
    ends = np.append(np.isin(actions, (*GROWS, Action.OOM)), False)
    return releases & ends[after] & (np.append(stacks, -1)[after] == stacks)


def _steps(columns: EventColumns, streams: Int64s, given_back: Flags, count: int) -> list[tuple[int, int, int, int]]:
    """Kind, address, bytes and stream of each request, release and call of empty_cache() in the first events."""
    actions = columns.actions
    kinds = np.full(len(actions), _OTHER)
    kinds[actions == Action.ALLOC], kinds[actions == Action.FREE_COMPLETED] = _ALLOCATE, _FREE
    emptied = np.isin(actions, SHRINKS) & ~given_back
    # one call gives back one segment after another
    kinds[emptied & ~np.append(False, emptied[:-1])] = _EMPTY_CACHE
    moves = np.flatnonzero(kinds[:count] != _OTHER)
    found = (column[moves].tolist() for column in (kinds, columns.addresses, columns.sizes, streams))
    return list(zip(*found, strict=True))
