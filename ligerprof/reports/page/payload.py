"""The data of one recording on a page, packed: its timeline, its blocks with their stacks, and its marked moments."""

import base64
import json
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ligerprof.analyzers.attribution.owners import Owner
from ligerprof.analyzers.attribution.stacks import CallSite, PythonCall
from ligerprof.analyzers.explain.analysis import SnapshotAnalysis
from ligerprof.analyzers.explain.groups import MOST_LISTED, BlockLives
from ligerprof.analyzers.explain.steps import step_starts
from ligerprof.analyzers.explain.timeline import MOST_COLUMNS, RoleTimeline, RunningTotals, event_times
from ligerprof.roles import ROLES, STEP_PHASES, Phase
from ligerprof.snapshots.segments import segments_at
from ligerprof.snapshots.trace import ACTIONS, Action, EventColumns, Int64s

_BITS = 7
_MOST_BYTES = 10


class ColumnPacker:
    """Collects columns of integers; `add` returns what the JSON refers to a column by.

    A column holds the differences of successive values, as zigzag varints (7 bits per byte, the lowest first).
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, values: Int64s) -> dict[str, int]:
        """Store a column."""
        encoded = encode_varints(np.diff(values, prepend=0).astype(np.int64))
        reference = {"at": self._size, "count": len(values)}
        self._parts.append(encoded)
        self._size += len(encoded)
        return reference

    def to_text(self, values: Any) -> str:
        """Base64 of a zlib stream: the length of the JSON (4 bytes, little-endian), the JSON, the columns."""
        # a name from a file may contain a lone surrogate; JSON escapes it
        text = json.dumps(values, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")
        whole = b"".join([len(text).to_bytes(4, "little"), text, *self._parts])
        return base64.b64encode(zlib.compress(whole, 9)).decode("ascii")


def encode_varints(values: Int64s) -> bytes:
    """Signed integers as zigzag varints."""
    zigzag = ((values << 1) ^ (values >> 63)).view(np.uint64)
    lengths = np.ones(len(values), dtype=np.int64)
    for count in range(1, _MOST_BYTES):
        lengths += zigzag >= np.uint64(1 << (_BITS * count))
    ends = np.cumsum(lengths)
    encoded = np.empty(int(ends[-1]) if len(ends) else 0, dtype=np.uint8)
    starts = ends - lengths
    for place in range(_MOST_BYTES):
        within = np.flatnonzero(lengths > place)
        digits = (zigzag[within] >> np.uint64(_BITS * place)) & np.uint64(127)
        more = (lengths[within] > place + 1).astype(np.uint8) << 7
        encoded[starts[within] + place] = digits.astype(np.uint8) | more
    return encoded.tobytes()


# bounds the size of a page, since names come from a file
_LONGEST_NAME = 200
# with the scripts, a page of a million events has at most 1.5 MB
_MOST_CHARACTERS = 1_150_000
# columns of the timeline, listed blocks, and listed events
_DETAILS = tuple((MOST_COLUMNS >> each, MOST_LISTED >> each, 200_000 >> each) for each in range(7))
_MOST_FRAMES = 120
_MOST_PIECES = 40_000
# kinds of pieces of a segment; a listed block is its index plus _LISTED
_FREE, _WAITING, _UNLISTED, _LISTED = range(4)
_PHASES = tuple(Phase)
_UNKNOWN = -1


def recording_text(analysis: SnapshotAnalysis, *, title: str) -> str:
    """Everything that the scripts draw of a recording, packed; in less detail if it would be too large."""
    for columns, blocks, events in _DETAILS:
        timeline = analysis.timeline if columns == MOST_COLUMNS else analysis.timeline_of(columns)
        text = _packed(analysis, timeline, analysis.lives(blocks), title, events)
        if len(text) <= _MOST_CHARACTERS:
            break
    return text


def _packed(analysis: SnapshotAnalysis, timeline: RoleTimeline, lives: BlockLives, title: str, events: int) -> str:
    columns = ColumnPacker()
    trace = EventColumns.of(analysis.replayed.trace, analysis.replayed.source)
    payload = {
        "title": shortened(title),
        "timeline": _timeline(timeline, columns),
        "marks": _marks(analysis),
        **_steps(analysis),
        "events": _events(analysis, lives, trace, columns, events),
        "mapped": _mapped(trace, columns),
        "before": _before(analysis, columns),
        "segments": [_segments(analysis, lives, moment, columns) for moment in analysis.marked_moments],
        "whatIfs": list(_what_ifs(analysis, timeline, columns)),
        **_Blocks(analysis, lives, trace, columns).payload(),
    }
    return columns.to_text(payload)


def shortened(name: str) -> str:
    """A name from a file, truncated if it is very long."""
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"


def _timeline(timeline: RoleTimeline, columns: ColumnPacker) -> dict[str, Any]:
    times = timeline.times_us
    return {
        "last": timeline.last_moment,
        "starts": columns.add(timeline.starts),
        "moments": columns.add(timeline.moments),
        "times": None if times is None else columns.add(times - times[0]),
        "lowest": columns.add(timeline.lowest_bytes),
        "reserved": columns.add(timeline.reserved_bytes),
        "roles": [
            {"name": role.value, "meaning": role.meaning, "bytes": columns.add(sizes)}
            for role, sizes in timeline.roles.items()
        ],
        "running": [_ran(running) for running in timeline.running],
        "ran": columns.add(timeline.running_of),
    }


def _ran(running: RunningTotals) -> tuple[int, str, str]:
    module, node = running.module, running.node
    place = f"{module} ({node})" if module and node else module or node
    return running.step, running.phase.value if running.phase else "", shortened(place)


def _steps(analysis: SnapshotAnalysis) -> dict[str, Any]:
    """Number and first moment of each step, and the moments that the page opens at."""
    replayed, phases = analysis.replayed, analysis.attribution.phases
    starts = step_starts(phases).tolist()
    numbers = [int(phases.steps[start]) for start in starts] if phases.stamped else [*range(1, len(starts) + 1)]
    if replayed.failures:
        # with the step before it, if there is one
        before = [start for start in starts if start <= replayed.failures[-1]][-2:]
        return {"steps": [numbers, starts], "opens": [*[*before, 0][:1], replayed.last_moment]}
    ran = {peaks.step: len(peaks.phases.keys() & set(STEP_PHASES)) for peaks in analysis.peak.steps}
    most = max(ran.values(), default=0)
    spans = zip(numbers, pairwise([*starts, replayed.last_moment]), strict=True)
    whole = [span for number, span in spans if ran.get(number) == most]
    return {"steps": [numbers, starts], "opens": [*whole[-1]] if whole else [0, replayed.last_moment]}


def _events(
    analysis: SnapshotAnalysis, lives: BlockLives, trace: EventColumns, columns: ColumnPacker, most: int
) -> dict[str, Any]:
    """The actions of up to `most` events around the last marked moment.

    Sizes and addresses are of the events that neither allocate nor free a listed block.
    """
    replayed = analysis.replayed
    end = min(replayed.last_moment, max(analysis.marked_moments) + most // 2)
    first = max(0, end - most)
    last = min(replayed.last_moment, first + most)
    known = np.zeros(len(trace.actions) + 1, dtype=bool)
    freed = replayed.freed_by[lives.blocks]
    for indices in (
        replayed.allocated_by[lives.blocks],
        freed,
        np.where(freed < 0, -1, freed + _completed(trace, freed)),
    ):
        known[indices] = True
    rest = np.flatnonzero(~known[first:last]) + first
    return {
        "names": [*ACTIONS, "other"],
        "first": first,
        "actions": columns.add(trace.actions[first:last]),
        "sizes": columns.add(trace.sizes[rest]),
        "addresses": columns.add(trace.addresses[rest]),
    }


def _mapped(trace: EventColumns, columns: ColumnPacker) -> list[dict[str, int]]:
    """The events that change segments: index, action, address, size."""
    found = np.flatnonzero((trace.actions >= Action.SEGMENT_ALLOC) & (trace.actions <= Action.SEGMENT_UNMAP))
    parts = (found, trace.actions[found], trace.addresses[found], trace.sizes[found])
    return [columns.add(part.astype(np.int64)) for part in parts]


def _before(analysis: SnapshotAnalysis, columns: ColumnPacker) -> list[dict[str, int]]:
    """Addresses and sizes of the segments before the first event."""
    found = segments_at(analysis.replayed, 0)
    return [
        columns.add(_column(each.address for each in found)),
        columns.add(_column(each.size_bytes for each in found)),
    ]


def _completed(trace: EventColumns, freed: Int64s) -> Int64s:
    """Events from each release to its completion, 0 if the recording ends first or the block is never freed."""
    found = np.zeros(len(freed), dtype=np.int64)
    released = np.flatnonzero(freed >= 0)
    before, after = freed[released], np.minimum(freed[released] + 1, len(trace.actions) - 1)
    same = (trace.actions[after] == Action.FREE_COMPLETED) & (trace.addresses[after] == trace.addresses[before])
    found[released[same]] = 1
    late = released[~same]
    if len(late):
        completions: dict[int, list[int]] = {}
        for index in np.flatnonzero(trace.actions == Action.FREE_COMPLETED).tolist():
            completions.setdefault(int(trace.addresses[index]), []).append(index)
        for block in late.tolist():
            event = int(freed[block])
            at = completions.get(int(trace.addresses[event]), [])
            place = bisect_right(at, event)
            found[block] = at[place] - event if place < len(at) else 0
    return found


def _column(values: Iterable[int]) -> Int64s:
    return np.fromiter(values, dtype=np.int64)


def _marks(analysis: SnapshotAnalysis) -> dict[str, Any]:
    replayed, oom = analysis.replayed, analysis.out_of_memory
    marks: dict[str, Any] = {"peak": {"moment": analysis.peak_moment, "bytes": analysis.peak.peak_bytes}}
    if oom is not None:
        *earlier, last = replayed.failures
        marks["earlier"] = list(earlier)
        marks["failure"] = {
            "moment": last,
            "bytes": oom.allocated_bytes,
            "requested": oom.requested_bytes,
        }
    return marks


def _what_ifs(analysis: SnapshotAnalysis, timeline: RoleTimeline, columns: ColumnPacker) -> Iterator[dict[str, Any]]:
    """Each suggestion with the highest bytes of each column after it."""
    for suggestion in analysis.suggestions:
        after = analysis.bytes_after(suggestion)
        highest = None if after is None else np.maximum.reduceat(after, timeline.starts)
        yield {
            "name": suggestion.name,
            "change": suggestion.change,
            "cost": suggestion.cost.value,
            "costReason": suggestion.cost_reason,
            "how": list(suggestion.how),
            "saves": suggestion.saves_bytes,
            "peak": suggestion.new_peak_bytes,
            "letsPass": suggestion.lets_pass,
            "basis": suggestion.basis.value,
            "condition": suggestion.condition,
            # how much lower each column is: mostly 0, so that it packs well
            "lower": None if highest is None else columns.add(timeline.allocated_bytes - highest),
        }


def _segments(analysis: SnapshotAnalysis, lives: BlockLives, moment: int, columns: ColumnPacker) -> dict[str, Any]:
    """The segments of a moment with their pieces in the order of addresses, those with most free bytes first.

    A piece is a size and a kind: free, waiting for a stream, an unlisted block, or 3 + the index of a listed block.
    Segments beyond a limit of pieces are summed up.
    """
    replayed, listed = analysis.replayed, lives.blocks
    number_of = {block: _LISTED + number for number, block in enumerate(listed.tolist())}
    found = sorted(segments_at(replayed, moment), key=lambda segment: (-segment.free_bytes, segment.address))
    count = np.cumsum([len(segment.blocks) + len(segment.waiting) + len(segment.free) for segment in found])
    shown = found[: int(np.searchsorted(count, _MOST_PIECES, "right"))]
    rest = found[len(shown) :]
    # one look-up for all blocks: it reads the whole trace
    blocks = np.array([block for segment in shown for block in segment.blocks], dtype=np.int64)
    held = zip(replayed.addresses_of(blocks).tolist(), replayed.block_bytes[blocks].tolist(), strict=True)
    pieces: list[tuple[int, int]] = []
    lengths = []
    for segment in shown:
        parts = [
            *((piece.address, piece.size_bytes, _FREE) for piece in segment.free),
            *((piece.address, piece.size_bytes, _WAITING) for piece in segment.waiting),
            *((*next(held), number_of.get(block, _UNLISTED)) for block in segment.blocks),
        ]
        lengths.append(len(parts))
        pieces += [(size, kind) for _, size, kind in sorted(parts)]
    return {
        "moment": moment,
        # as text, since an address may need more than the 53 bits of a number in JavaScript
        "segments": [[f"{each.address:#x}", each.small, each.stream, each.pool] for each in shown],
        "lengths": columns.add(_column(lengths)),
        "sizes": columns.add(_column(size for size, _ in pieces)),
        "kinds": columns.add(_column(kind for _, kind in pieces)),
        "rest": [len(rest), sum(each.size_bytes for each in rest), sum(each.free_bytes for each in rest)],
    }


class _Numbers:
    """Numbers values in the order in which they appear."""

    def __init__(self) -> None:
        self.found: dict[Any, int] = {}

    def of(self, value: Any) -> int:
        """The number of a value."""
        return self.found.setdefault(value, len(self.found))


class _Blocks:
    """The listed blocks, and the call sites, stacks and frames that they refer to by number."""

    def __init__(
        self, analysis: SnapshotAnalysis, lives: BlockLives, trace: EventColumns, columns: ColumnPacker
    ) -> None:
        self._analysis = analysis
        self._trace = trace
        self._lives = lives
        self._columns = columns
        self._frames: dict[PythonCall, int] = {}
        self._stacks: dict[tuple[int, ...], int] = {}

    def payload(self) -> dict[str, Any]:
        analysis, add = self._analysis, self._columns.add
        replayed, lives = analysis.replayed, self._lives
        blocks = lives.blocks
        owners = self._owners(blocks)
        allocated, freed = replayed.allocated_by[blocks], replayed.freed_by[blocks]
        phase_codes = {phase: code for code, phase in enumerate(_PHASES)}
        sites, keepers = _Numbers(), _Numbers()
        listed: dict[str, Any] = {
            "bytes": add(replayed.requested_bytes[blocks]),
            "role": add(analysis.role_codes[blocks]),
            "site": add(_column(sites.of(owner.site) for owner in owners)),
            "keeper": add(_column(keepers.of(owner.keeper) for owner in owners)),
            "layer": add(_column(_UNKNOWN if owner.layer is None else owner.layer for owner in owners)),
            "phase": add(_column(phase_codes[owner.phase] for owner in owners)),
            "step": add(np.append(analysis.attribution.phases.steps, 0)[allocated]),
            "from": add(allocated),
            # of blocks that live to the end, this is negative
            "events": add(np.where(freed < 0, _UNKNOWN, freed - allocated)),
            "times": self._lifetimes(allocated, freed),
            "address": add(replayed.addresses_of(blocks)),
            "rounding": add(replayed.block_bytes[blocks] - replayed.requested_bytes[blocks]),
            "waits": add(_completed(self._trace, freed)),
        }
        described = [self._site(analysis.attribution.call_sites.sites[site]) for site in sites.found]
        return {
            "roles": [role.value for role in ROLES],
            "phases": [phase.value for phase in _PHASES],
            "blocks": listed,
            "leastBytes": lives.least_bytes,
            "allBlocks": len(replayed.requested_bytes),
            "sites": described,
            "keepers": [[shortened(keeper.name), shortened(keeper.place)] for keeper in keepers.found],
            "stacks": self._lists(self._stacks),
            "frames": [[shortened(file), line, shortened(function)] for file, line, function in self._frames],
        }

    def _owners(self, blocks: Int64s) -> list[Owner]:
        """The owners of the listed blocks; those of a marked moment are the same as in the report on it."""
        analysis = self._analysis
        owners = {owner.block: owner for owner in analysis.attribution.owners_of(blocks, analysis.peak_moment)}
        for moment in reversed(analysis.marked_moments):
            # call sites have numbers of their own there
            owners |= {
                one.block: one._replace(site=owners[one.block].site)
                for one in analysis.owners_at(moment)
                if one.block in owners
            }
        return [owners[block] for block in blocks.tolist()]

    def _lifetimes(self, allocated: Int64s, freed: Int64s) -> list[dict[str, int]] | None:
        """Microseconds from the first event to each allocation, and from there to each release, -1 if none."""
        times = event_times(self._analysis.replayed)
        if times is None:
            return None
        starts = np.where(allocated < 0, 0, times[allocated] - times[0])
        ends = np.where(freed < 0, _UNKNOWN, times[freed] - times[0] - starts)
        return [self._columns.add(starts), self._columns.add(ends)]

    def _site(self, site: CallSite) -> list[Any]:
        """Module, description, autograd node, operation, number of the stack."""
        return [
            shortened(site.module),
            shortened(site.description),
            shortened(site.node),
            shortened(site.operation),
            self._stack(site.stack.calls[:_MOST_FRAMES]),
        ]

    def _stack(self, calls: Sequence[PythonCall]) -> int:
        frames = tuple(self._frames.setdefault(call, len(self._frames)) for call in calls)
        return self._stacks.setdefault(frames, len(self._stacks))

    def _lists(self, lists: Iterable[Sequence[int]]) -> list[dict[str, int]]:
        """Lists of numbers as two columns: lengths, and all members."""
        kept = [np.array(each, dtype=np.int64) for each in lists]
        lengths = np.array([len(each) for each in kept], dtype=np.int64)
        members = np.concatenate([*kept, np.zeros(0, dtype=np.int64)])
        return [self._columns.add(lengths), self._columns.add(members)]
