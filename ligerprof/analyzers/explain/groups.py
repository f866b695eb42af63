"""Group the blocks that are live at a moment by what they are, who allocated them and what keeps them."""

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ligerprof.analyzers.attribution.owners import Owners
from ligerprof.models.module_names import without_indices
from ligerprof.roles import Phase, Role
from ligerprof.snapshots.distinct import distinct_rows, numbered
from ligerprof.snapshots.trace import Int64s


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockGroup:
    """Blocks at one moment that share role, module, frame, phase, layers, operation and keeper.

    Attributes:
        size_bytes: requested bytes of all blocks.
        count: number of blocks.
        module: dotted module name, "" if unknown.
        frame: `file:line function` of the Python code that allocated them, or an autograd node's name, or "".
        layers: indices of the decoder layers, ascending; empty outside the layers.
        operation: the torch operator, Python function or autograd node that allocated them, or "".
        kept_by: the autograd node that saved them for backward, `checkpoint`, `Python` for a variable of the program,
            or "" if not known.
        kept_in: the node's module, or `file:line function` of the Python code that released them, or "".
        frames: the stack of the allocation, innermost first; only if the blocks were grouped by stack.
    """

    role: Role
    size_bytes: int
    count: int
    module: str
    frame: str
    phase: Phase
    layers: tuple[int, ...] = ()
    operation: str = ""
    kept_by: str = ""
    kept_in: str = ""
    frames: tuple[str, ...] = ()

    @property
    def layer(self) -> int | None:
        """Index of the decoder layer, None outside the layers or in several."""
        return self.layers[0] if len(self.layers) == 1 else None

    def to_json(self) -> dict[str, Any]:
        """An entry of `blocks` in the JSON."""
        # a recording can have ten thousand groups, and `select` takes ten times as long
        values = {
            "role": self.role.value,
            "bytes": self.size_bytes,
            "count": self.count,
            "module": self.module,
            "frame": self.frame,
            "phase": self.phase.value,
            "layer": self.layer,
            "layers": list(self.layers),
            "operation": self.operation,
            "kept_by": self.kept_by,
            "kept_in": self.kept_in,
        }
        return {**values, "frames": list(self.frames)} if self.frames else values


def group_blocks(owners: Owners, *, by_stack: bool = False) -> tuple[BlockGroup, ...]:
    """Group the owners that differ only in their block, the largest group first.

    Args:
        by_stack: group by stack too; each group then has its stack.
    """
    first, group_of = _kinds(owners, by_stack=by_stack)
    sizes = np.zeros(len(first), dtype=np.int64)
    np.add.at(sizes, group_of, owners.requested_bytes)
    # of groups of one size, the one that comes first
    order = np.lexsort((first, -sizes))
    counts = np.bincount(group_of, minlength=len(first))[order].tolist()
    members = zip(owners.chosen(first[order]), sizes[order].tolist(), counts, strict=True)
    return tuple(
        BlockGroup(
            role=one.role,
            size_bytes=size_bytes,
            count=count,
            module=one.module,
            frame=one.frame,
            phase=one.phase,
            layers=() if one.layer is None else (one.layer,),
            operation=one.operation,
            kept_by=one.keeper.name,
            kept_in=one.keeper.place,
            frames=owners.sites[one.site].stack.lines if by_stack else (),
        )
        for one, size_bytes, count in members
    )


def _kinds(owners: Owners, *, by_stack: bool) -> tuple[Int64s, Int64s]:
    """The first owner of each group, and the group of each owner."""
    used, used_of = numbered(owners.site_of)
    places: dict[Hashable, int] = {}
    operations: dict[str, int] = {}
    of_sites = []
    for site in map(owners.sites.__getitem__, used.tolist()):
        place = (site.module, site.description, site.stack.lines if by_stack else ())
        numbers = places.setdefault(place, len(places)), operations.setdefault(site.operation, len(operations))
        of_sites.append(numbers)
    place_of, operation_of = np.array(of_sites, dtype=np.int64).reshape(-1, 2)[used_of].T
    # the keeper knows the operation better; -1 if it does not
    noted = np.array(
        [
            operations.setdefault(keeper.operation, len(operations)) if keeper.operation else -1
            for keeper in owners.keepers
        ],
        dtype=np.int64,
    )[owners.keeper_of]
    operation_of = np.where(noted < 0, operation_of, noted)
    return distinct_rows(
        (owners.role_codes, owners.phase_codes, owners.layers, place_of, operation_of, owners.keeper_of)
    )


def join_layers(groups: Iterable[BlockGroup]) -> tuple[BlockGroup, ...]:
    """Join the groups that differ only in their decoder layer, the largest first; indices in names become `*`."""
    joined: dict[tuple[str, str, Hashable], list[BlockGroup]] = defaultdict(list)
    for group in groups:
        module, place = without_indices(group.module), without_indices(group.kept_in)
        same = (group.role, group.frame, group.phase, group.operation, group.kept_by, group.frames, bool(group.layers))
        joined[module, place, same].append(group)
    rows = [
        replace(
            members[0],
            module=module,
            kept_in=place,
            size_bytes=sum(group.size_bytes for group in members),
            count=sum(group.count for group in members),
            layers=tuple(sorted({layer for group in members for layer in group.layers})),
        )
        for (module, place, _), members in joined.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.size_bytes))
