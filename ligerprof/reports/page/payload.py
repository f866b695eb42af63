"""The data of one recording on a page: its timeline, its blocks with their stacks, and its marked moments."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ligerprof.analyzers.attribution.call_sites import CallSite
from ligerprof.analyzers.attribution.stacks import PythonCall
from ligerprof.analyzers.explain.analysis import SnapshotAnalysis
from ligerprof.analyzers.explain.timeline import RoleTimeline, Running, event_times
from ligerprof.reports.page.packing import ColumnPacker
from ligerprof.roles import Phase, Role
from ligerprof.snapshots.trace import Int64s

# bounds the size of a page, since names come from a file
_LONGEST_NAME = 200
_MOST_FRAMES = 120
_ROLES, _PHASES = tuple(Role), tuple(Phase)
_UNKNOWN = -1


def recording_text(analysis: SnapshotAnalysis, *, title: str) -> str:
    """Everything that the scripts draw of a recording, packed."""
    columns = ColumnPacker()
    payload = {
        "title": shortened(title),
        "timeline": _timeline(analysis.timeline, columns),
        "marks": _marks(analysis),
        **_Blocks(analysis, columns).payload(),
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


def _ran(running: Running) -> tuple[int, str, str]:
    module, node = running.module, running.node
    place = f"{module} ({node})" if module and node else module or node
    return running.step, running.phase.value if running.phase else "", shortened(place)


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


class _Blocks:
    """The listed blocks, and the call sites, stacks and frames that they refer to by number."""

    def __init__(self, analysis: SnapshotAnalysis, columns: ColumnPacker) -> None:
        self._analysis = analysis
        self._columns = columns
        self._frames: dict[PythonCall, int] = {}
        self._stacks: dict[tuple[int, ...], int] = {}

    def payload(self) -> dict[str, Any]:
        analysis, add = self._analysis, self._columns.add
        replayed, lives = analysis.replayed, analysis.lives
        blocks = lives.blocks
        allocated, freed = replayed.allocated_by[blocks], replayed.freed_by[blocks]
        sites, site_of = np.unique(analysis.attribution.call_sites.site_of[blocks], return_inverse=True)
        phases = analysis.attribution.phases
        listed: dict[str, Any] = {
            "bytes": add(replayed.requested_bytes[blocks]),
            "role": add(analysis.role_codes[blocks]),
            "site": add(site_of.reshape(-1).astype(np.int64)),
            "phase": add(phases.codes_of(allocated)),
            "step": add(np.append(phases.steps, 0)[allocated]),
            "from": add(allocated),
            # of blocks that live to the end, this is negative
            "events": add(np.where(freed < 0, _UNKNOWN, freed - allocated)),
            "times": self._lifetimes(allocated, freed),
        }
        found = [analysis.attribution.call_sites.sites[site] for site in sites.tolist()]
        described = [self._site(site) for site in found]
        return {
            "roles": [role.value for role in _ROLES],
            "phases": [phase.value for phase in _PHASES],
            "blocks": listed,
            "leastBytes": lives.least_bytes,
            "allBlocks": len(replayed.requested_bytes),
            "sites": described,
            "stacks": self._lists(self._stacks),
            "frames": [[shortened(file), line, shortened(function)] for file, line, function in self._frames],
        }

    def _lifetimes(self, allocated: Int64s, freed: Int64s) -> list[dict[str, int]] | None:
        """Microseconds from the first event to each allocation, and from there to each release, -1 if none."""
        times = event_times(self._analysis.replayed)
        if times is None:
            return None
        starts = np.where(allocated < 0, 0, times[allocated] - times[0])
        ends = np.where(freed < 0, _UNKNOWN, times[freed] - times[0] - starts)
        return [self._columns.add(starts), self._columns.add(ends)]

    def _site(self, site: CallSite) -> list[Any]:
        """Module, description, autograd node, number of the stack."""
        return [
            shortened(site.module),
            shortened(site.description),
            shortened(site.node),
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
