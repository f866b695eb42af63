"""The owners of blocks as columns: what each block is, who allocated it, and what keeps it alive."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from ligerprof.analyzers.attribution.layers import NO_LAYER
from ligerprof.analyzers.attribution.phases import BlockFinder, DeviceBlocks, phase_code, phase_of_code
from ligerprof.analyzers.attribution.stacks import CallSite, StackReader
from ligerprof.roles import ROLES, Phase, Role
from ligerprof.snapshots.stamp import SavedTensor, Stamp
from ligerprof.snapshots.trace import Flags, Int64s

# what releases a block when its last reference is a variable of the program
PYTHON = "Python"
CHECKPOINT = "checkpoint"
# blocks of earlier steps that are compared with one that the recording does not release
_MOST_ALIKE = 64


class Keeper(NamedTuple):
    """What keeps a block alive.

    Attributes:
        name: the autograd node that saved it, several if they have different names, `checkpoint` for the input of a
            checkpointed layer, `Python` for a variable of the program, "" if not known.
        place: the module of the nodes, or `file:line function` of the Python code that released the block, or "".
        operation: what computed the block, if a recorder noted it.
    """

    name: str
    place: str
    operation: str = ""


NOT_KNOWN = Keeper("", "")


class Keepers(BlockFinder):
    """The keepers of a device's blocks.

    Our recorders note the nodes that saved a block. Otherwise, the evidence is the event that frees the block: its
    stamp, or its stack, which torch records with `context="all"`, the default. A node releases its saved tensors
    when it has run, and the last node to do so frees the block. For a block that outlives the recording, blocks of
    the same place in earlier steps are the evidence, if they agree: those of the same size, if there are any.
    """

    def __init__(self, blocks: DeviceBlocks, saved: Sequence[SavedTensor] = ()) -> None:
        super().__init__(blocks)
        self._saved = saved
        self._reader = StackReader()
        self._times = self._replayed.trace.numbers("time_us")
        recomputing = [site for site in self._call_sites.sites if site.recomputes]
        self._checkpointing = bool(recomputing)
        self._recomputed_modules = frozenset(site.module for site in recomputing if site.stamp)
        # by surroundings and size, and by surroundings
        self._borrowed: dict[int, Keeper] = {}
        self._borrowed_at: dict[int, frozenset[Keeper]] = {}
        self._borrowed_in_detail: dict[int, Keeper] = {}

    def of(self, blocks: Int64s, moment: int) -> tuple[Int64s, list[Keeper]]:
        """What keeps each block at a moment, if forward or its recomputation allocated it; not known for others.

        Returns:
            The index of each block's keeper, and the distinct keepers.
        """
        replayed, sites = self._replayed, self._call_sites
        asked = self._codes[blocks] == phase_code(Phase.FORWARD)
        asked |= sites.at(lambda site: site.recomputes)[blocks]
        in_backward = self._phases.phase_at(moment - 1) is Phase.BACKWARD
        numbers = {NOT_KNOWN: 0}
        keeper_of = np.zeros(len(blocks), dtype=np.int64)
        chosen = blocks[asked]
        keeper_of[asked] = [
            numbers.setdefault(self._keeper(block, event, in_backward=in_backward), len(numbers))
            for block, event in zip(chosen.tolist(), replayed.freed_by[chosen].tolist(), strict=True)
        ]
        return keeper_of, list(numbers)

    def _keeper(self, block: int, freed_by: int, *, in_backward: bool) -> Keeper:
        noted = self._noted(block)
        if noted.name and not in_backward:
            return noted
        found = self._releaser(block, freed_by) if freed_by >= 0 else NOT_KNOWN
        # in backward, some of the nodes may have run already, and the last one certainly has not
        if noted.name and found.name in ("", PYTHON):
            return noted
        if not found.name and freed_by >= 0 and self._is_nameless[freed_by]:
            return self._of_detailed_steps(block)
        kept = found if found.name else self._of_earlier_steps(block)
        return kept._replace(operation=noted.operation)

    def _noted(self, block: int) -> Keeper:
        """The nodes that a recorder saw saving the block."""
        event = int(self._replayed.allocated_by[block])
        if event < 0 or not self._saved_at:
            return NOT_KNOWN
        freed, size = int(self._replayed.freed_by[block]), int(self._replayed.requested_bytes[block])
        start, end = self._times[event], self._times[freed] if freed >= 0 else math.inf
        rows = [
            row
            for row in self._saved_at.get(self._replayed.trace[event]["addr"], ())
            if row.size_bytes <= size and start <= row.time_us <= end
        ]
        if not self._call_sites.of(block).recomputes:
            # what recomputation saves again was held by the checkpoint until then
            events = (np.searchsorted(self._times, [row.time_us for row in rows]) - 1).tolist()
            phases = map(self._phases.phase_at, events)
            rows = [row for row, phase in zip(rows, phases, strict=True) if phase is not Phase.BACKWARD]
        operation = next((row.operation for row in rows if row.operation), "")
        return Keeper(", ".join(dict.fromkeys(row.node for row in rows)), _common(rows), operation)

    @cached_property
    def _saved_at(self) -> Mapping[int, Sequence[SavedTensor]]:
        found: dict[int, list[SavedTensor]] = defaultdict(list)
        for row in self._saved:
            if row.device == self._replayed.device:
                found[row.address].append(row)
        return found

    def _releaser(self, block: int, freed_by: int) -> Keeper:
        event = self._replayed.trace[freed_by]
        stamp = Stamp.parse(event.get("user_metadata"))
        if stamp is not None and stamp.node:
            # nodes of a checkpointed module save nothing; the last one drops the checkpoint
            from_forward = not self._call_sites.of(block).recomputes
            is_checkpoint = from_forward and stamp.module in self._recomputed_modules
            return Keeper(CHECKPOINT, "") if is_checkpoint else Keeper(stamp.node, stamp.module)
        released = self._reader.read(event.get("frames"))
        allocated = self._call_sites.of(block).stack
        # with context="alloc", torch repeats the stack of the allocation; in the same call it is a temporary
        if released.lines == allocated.lines:
            return NOT_KNOWN
        if released.releases_packed and not self._call_sites.of(block).recomputes:
            return Keeper(CHECKPOINT, "") if self._checkpointing else NOT_KNOWN
        node = released.releasing_node or released.node
        if node:
            return Keeper(node, "")
        # Python code dropped the last reference, rather than an operator its own temporary
        by_program = released.on_main_thread and released.calls != allocated.calls and released.deallocates
        return Keeper(PYTHON, released.innermost) if by_program else NOT_KNOWN

    def _of_earlier_steps(self, block: int) -> Keeper:
        if not len(self._released) or self._replayed.allocated_by[block] <= self._last_backward_end:
            # nothing shows its keeper, or its own backward ended without releasing it
            return NOT_KNOWN
        place, kind = int(self._call_sites.surroundings[block]), int(self._places_and_sizes[block])
        if kind not in self._borrowed:
            # sequences of another length have other sizes
            found = self._releasers(self._released_by_size.newest(kind)) or self._releasers_at(place)
            self._borrowed[kind] = _agreed(found)
        return self._borrowed[kind]

    def _of_detailed_steps(self, block: int) -> Keeper:
        """The keeper of blocks like this one in the steps in which stamps name nodes, if they agree."""
        kind = int(self._places_and_sizes[block])
        if kind not in self._borrowed_in_detail:
            alike = self._released_by_size.newest(kind)
            noted = frozenset(each for each in map(self._noted, alike) if each.name)
            self._borrowed_in_detail[kind] = _agreed(noted or self._releasers(alike))
        return self._borrowed_in_detail[kind]

    def _releasers_at(self, place: int) -> frozenset[Keeper]:
        if place not in self._borrowed_at:
            self._borrowed_at[place] = self._releasers(self._released_by_place.newest(place))
        return self._borrowed_at[place]

    def _releasers(self, blocks: Sequence[int]) -> frozenset[Keeper]:
        return frozenset(self._releaser(block, int(self._replayed.freed_by[block])) for block in blocks)

    @cached_property
    def _places_and_sizes(self) -> Int64s:
        """A number for each block; equal for blocks of the same surroundings and size."""
        sizes, size_of = self._call_sites.sizes
        return self._call_sites.surroundings * len(sizes) + size_of

    @cached_property
    def _released_by_size(self) -> "_Newest":
        return _Newest(self._released, self._places_and_sizes)

    @cached_property
    def _released_by_place(self) -> "_Newest":
        return _Newest(self._released, self._call_sites.surroundings)

    @cached_property
    def _released(self) -> Int64s:
        """The blocks of steps whose backward has ended, and that are freed."""
        replayed = self._replayed
        known = (replayed.freed_by >= 0) & (replayed.allocated_by <= self._last_backward_end)
        return np.flatnonzero(known & ~np.append(self._is_nameless, False)[replayed.freed_by])

    @cached_property
    def _is_nameless(self) -> Flags:
        """Whether the stamp of each event is of backward without a node: most steps have only those of modules."""
        nameless = [each is not None and each.phase is Phase.BACKWARD and not each.node for each in self._phases.stamps]
        return np.array(nameless, dtype=bool)[self._phases.stamp_of]

    @cached_property
    def _last_backward_end(self) -> int:
        """The last event of the last backward pass that another phase follows, -1 if none."""
        in_backward = self._phases.codes == phase_code(Phase.BACKWARD)
        ends = np.flatnonzero(in_backward[:-1] & ~in_backward[1:])
        return int(ends[-1]) if len(ends) else -1


class _Newest:
    """Some blocks in groups of equal number, sorted once: a recording can have as many groups as blocks."""

    def __init__(self, blocks: Int64s, numbers: Int64s) -> None:
        order = np.argsort(numbers[blocks], kind="stable")
        self._blocks = blocks[order]
        self._numbers = numbers[self._blocks]

    def newest(self, number: int) -> list[int]:
        """The newest blocks of one group, oldest first; empty for an unknown group."""
        start, end = np.searchsorted(self._numbers, (number, number + 1)).tolist()
        return self._blocks[max(start, end - _MOST_ALIKE) : end].tolist()


def _agreed(found: frozenset[Keeper]) -> Keeper:
    return next(iter(found)) if len(found) == 1 else NOT_KNOWN


def _common(rows: Sequence[SavedTensor]) -> str:
    paths = [row.module.split(".") for row in rows]
    levels = takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False))
    return ".".join(names[0] for names in levels)


_COLUMNS = ("blocks", "requested_bytes", "role_codes", "phase_codes", "layers", "site_of", "keeper_of")


class Owner(NamedTuple):
    """The role and origin of one block.

    Attributes:
        block: its index in the replay.
        module: dotted module name, "" if unknown.
        frame: the Python call or autograd node that allocated it, or "".
        layer: index of the decoder layer, None outside the layers or if unknown.
        site: index of its call site in `Attribution.call_sites.sites`.
        operation: the torch operator, Python function or autograd node that allocated it, or "".
    """

    block: int
    requested_bytes: int
    role: Role
    module: str
    frame: str
    phase: Phase
    layer: int | None
    site: int
    operation: str
    keeper: Keeper


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Owners:
    """The owners of some blocks, since a moment can have hundreds of thousands; an `Owner` is made on access.

    Attributes:
        blocks: indices in the replay.
        role_codes: index in `ROLES` of each block's role.
        phase_codes: `phase_code` of each block's phase; `outside` if unknown.
        layers: NO_LAYER outside the layers or if unknown.
        site_of: index into `sites` of each block.
        keeper_of: index into `keepers` of each block.
    """

    blocks: Int64s
    requested_bytes: Int64s
    role_codes: Int64s
    phase_codes: Int64s
    layers: Int64s
    site_of: Int64s
    keeper_of: Int64s
    sites: Sequence[CallSite]
    keepers: Sequence[Keeper]

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> Owner:
        return next(iter(self.chosen(np.array([index], dtype=np.int64))))

    def __iter__(self) -> Iterator[Owner]:
        columns = (getattr(self, name).tolist() for name in _COLUMNS)
        for block, size_bytes, role, phase, layer, number, keeper_number in zip(*columns, strict=True):
            site, keeper = self.sites[number], self.keepers[keeper_number]
            yield Owner(
                block=block,
                requested_bytes=size_bytes,
                role=ROLES[role],
                module=site.module,
                frame=site.description,
                phase=phase_of_code(phase) or Phase.OUTSIDE,
                layer=None if layer == NO_LAYER else layer,
                site=number,
                operation=keeper.operation or site.operation,
                keeper=keeper,
            )

    def chosen(self, places: Int64s) -> "Owners":
        """Some of the owners."""
        columns = {name: getattr(self, name)[places] for name in _COLUMNS}
        return Owners(**columns, sites=self.sites, keepers=self.keepers)

    def bytes_by_role(self) -> dict[Role, int]:
        """Requested bytes of each role that occurs, in the order in which the roles appear."""
        sums = np.zeros(len(ROLES), dtype=np.int64)
        np.add.at(sums, self.role_codes, self.requested_bytes)
        return {ROLES[code]: int(sums[code]) for code in dict.fromkeys(self.role_codes.tolist())}
