"""Find what keeps blocks of the forward pass alive: the autograd node, or the Python code, that released them."""

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ligerprof.analyzers.attribution.call_sites import CallSites
from ligerprof.analyzers.attribution.phases import EventPhases, phase_code
from ligerprof.analyzers.attribution.stacks import Stack, StackReader
from ligerprof.roles import Phase
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.stamp import Stamp
from ligerprof.snapshots.trace import Int64s

# what releases a block when its last reference is a variable of the program
PYTHON = "Python"
# blocks of earlier steps that are compared with one that the recording does not release
_MOST_ALIKE = 64


class Keeper(NamedTuple):
    """What keeps a block alive.

    Attributes:
        name: the autograd node that saved it, `checkpoint` for the input of a checkpointed layer, `Python` for a
            variable of the program, "" if not known.
        place: the node's module, or `file:line function` of the Python code that released the block, or "".
    """

    name: str
    place: str


NOT_KNOWN = Keeper("", "")
CHECKPOINT = Keeper("checkpoint", "")


class Keepers:
    """The keepers of a device's blocks.

    The evidence is the event that frees a block: its stamp, or its stack, which torch records with
    `context="all"`, the default. A node releases its saved tensors when it has run, and the last node to do so
    frees the block. For a block that outlives the recording, blocks of the same place and size in
    earlier steps are the evidence, if they agree.
    """

    def __init__(self, replayed: Replay, call_sites: CallSites, phases: EventPhases) -> None:
        self._replayed = replayed
        self._call_sites = call_sites
        self._phases = phases
        self._reader = StackReader()
        self._borrowed: dict[tuple[int, int, int], Keeper] = {}

    def of(self, blocks: Int64s) -> list[Keeper]:
        """The keeper of each block that forward or its recomputation allocated; not known for others."""
        replayed, forward = self._replayed, phase_code(Phase.FORWARD)
        codes = self._phases.codes_of(replayed.allocated_by[blocks]).tolist()
        freed = replayed.freed_by[blocks].tolist()
        return [
            self._keeper(block, event) if code == forward or self._call_sites.of(block).recomputes else NOT_KNOWN
            for block, code, event in zip(blocks.tolist(), codes, freed, strict=True)
        ]

    def _keeper(self, block: int, freed_by: int) -> Keeper:
        return self._releaser(block, freed_by) if freed_by >= 0 else self._of_earlier_steps(block)

    def _releaser(self, block: int, freed_by: int) -> Keeper:
        event = self._replayed.trace[freed_by]
        text = event.get("user_metadata")
        stamp = Stamp.parse(text) if isinstance(text, str) else None
        if stamp is not None and stamp.node:
            return Keeper(stamp.node, stamp.module)
        released = self._reader.read(event.get("frames"))
        allocated = self._call_sites.of(block).stack
        # with context="alloc", torch repeats the stack of the allocation; in the same call it is a temporary
        if released.lines == allocated.lines:
            return NOT_KNOWN
        node = released.releasing_node or released.node
        if node:
            return Keeper(node, "")
        return Keeper(PYTHON, released.innermost) if _drops_a_variable(released, allocated) else NOT_KNOWN

    def _of_earlier_steps(self, block: int) -> Keeper:
        if self._replayed.allocated_by[block] <= self._last_backward_end:
            # its own backward has ended without releasing it
            return NOT_KNOWN
        sites = self._call_sites
        key = int(sites.place_of[block]), int(sites.index_in_call[block]), int(self._replayed.requested_bytes[block])
        if key not in self._borrowed:
            found = set(self._alike(*key))
            self._borrowed[key] = found.pop() if len(found) == 1 else NOT_KNOWN
        return self._borrowed[key]

    def _alike(self, place: int, index: int, size: int) -> Iterator[Keeper]:
        replayed, sites = self._replayed, self._call_sites
        alike = (sites.place_of == place) & (sites.index_in_call == index) & (replayed.requested_bytes == size)
        for block in np.flatnonzero(alike & (replayed.freed_by >= 0))[-_MOST_ALIKE:].tolist():
            yield self._releaser(block, int(replayed.freed_by[block]))

    @cached_property
    def _last_backward_end(self) -> int:
        """The last event of the last backward pass that another phase follows, -1 if none."""
        in_backward = self._phases.codes == phase_code(Phase.BACKWARD)
        ends = np.flatnonzero(in_backward[:-1] & ~in_backward[1:])
        return int(ends[-1]) if len(ends) else -1


def _drops_a_variable(released: Stack, allocated: Stack) -> bool:
    """Whether Python code dropped the last reference, rather than an operator its own temporary."""
    return released.on_main_thread and released.calls != allocated.calls and released.deallocates
