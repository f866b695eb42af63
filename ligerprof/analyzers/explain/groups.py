"""Group the blocks of one moment that share a role and an origin."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ligerprof.analyzers.attribution.blocks import Owner
from ligerprof.roles import Phase, Role
from ligerprof.serialization import select


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockGroup:
    """Blocks of one moment that share role, module, frame, phase and layer.

    Attributes:
        size_bytes: requested bytes of all blocks.
        count: number of blocks.
        module: dotted module name, "" if unknown.
        frame: `file:line function` of the Python code that allocated them, or an autograd node's name, or "".
        layer: index of the decoder layer, None outside the layers.
    """

    role: Role
    size_bytes: int
    count: int
    module: str
    frame: str
    phase: Phase
    layer: int | None = None

    def to_json(self) -> dict[str, Any]:
        """An entry of `blocks` in the JSON."""
        return select(self, "role", "bytes=size_bytes", "count", "module", "frame", "phase", "layer")


def group_blocks(owners: Iterable[Owner]) -> tuple[BlockGroup, ...]:
    """Group the owners that differ only in their block, the largest group first."""
    grouped: dict[tuple[Role, str, str, Phase, int | None], list[Owner]] = defaultdict(list)
    for owner in owners:
        grouped[owner.role, owner.module, owner.frame, owner.phase, owner.layer].append(owner)
    groups = [
        BlockGroup(
            role=role,
            size_bytes=sum(owner.requested_bytes for owner in members),
            count=len(members),
            module=module,
            frame=frame,
            phase=phase,
            layer=layer,
        )
        for (role, module, frame, phase, layer), members in grouped.items()
    ]
    return tuple(sorted(groups, key=lambda group: -group.size_bytes))
