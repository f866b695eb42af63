"""Recordings of a few allocations, for tests of programs that no recorded file covers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ligerprof.analyzers.explain.analysis import analyze
from ligerprof.roles import Role
from ligerprof.snapshots.reader import Snapshot

KIB = 2**10
MIB = 2**20
ALIGNMENT = 512

# file, line, function; the file of a C++ function is "??"
Call = tuple[str, int, str]
# address, size
Block = tuple[int, int]


class Recording:
    """Allocations one after another, each at its own address in one segment.

    Attributes:
        count: number of allocations.
    """

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.count = 0
        self._frames: dict[tuple[Call, ...], list[dict[str, Any]]] = {}
        self._address = 2**40
        self._add("segment_alloc", self._address, 2**40, ())

    def alloc(self, size: int, calls: Sequence[Call]) -> Block:
        """Allocate a block; its stack ends in a call of a script."""
        block = self._address, size
        self.count += 1
        self._address += -size % ALIGNMENT + size
        self._add("alloc", *block, calls)
        return block

    def free(self, block: Block) -> None:
        for action in ("free_requested", "free_completed"):
            self._add(action, *block, [])

    def run_out(self, size: int, calls: Sequence[Call]) -> None:
        """Fail to allocate."""
        self._add("oom", 0, size, calls)
        self.events[-1]["device_free"] = 0

    def snapshot(self) -> Snapshot:
        return Snapshot.from_dict({"device_traces": [self.events], "segments": []})

    def roles(self) -> list[Role]:
        """The role of each allocated block."""
        found = analyze(self.snapshot())
        return found.attribution.roles_of(np.arange(len(found.replayed.requested_bytes)), found.peak_moment)

    def _add(self, action: str, address: int, size: int, calls: Sequence[Call]) -> None:
        # as torch writes them, events of one place share their frames
        frames = self._frames.setdefault(
            tuple(calls), [{"filename": file, "line": line, "name": name} for file, line, name in calls]
        )
        self.events.append({"action": action, "addr": address, "size": size, "frames": frames, "stream": 0})
