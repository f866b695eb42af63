"""Give every block alive at a moment its role, module, frame, phase and layer."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ligerprof.analyzers.attribution_facts import FactFinder
from ligerprof.analyzers.attribution_layers import layers_by_weights, layers_in_passes
from ligerprof.analyzers.attribution_requests import Requests
from ligerprof.analyzers.attribution_rules import role_of
from ligerprof.analyzers.attribution_timeline import Timeline, make_timeline
from ligerprof.roles import MemoryBreakdown, Phase, Role
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.trace import Int64s


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """Who holds one block.

    Attributes:
        block: its index in the replay.
        module: dotted module name, "" where unknown.
        frame: the Python call or autograd node that asked, or "".
        layer: index of the decoder layer, None outside or where unknown.
    """

    block: int
    requested_bytes: int
    role: Role
    module: str
    frame: str
    phase: Phase
    layer: int | None


class Attribution:
    """The owners of a replayed device's blocks.

    Args:
        replayed: the device.
        annotations: the snapshot's named ranges of time.

    Attributes:
        replayed: the device.
        requests: who asked for each block.
        timeline: the phase of each event.
    """

    def __init__(self, replayed: Replay, annotations: Sequence[Mapping[str, Any]] = ()) -> None:
        self.replayed = replayed
        self.requests = Requests(replayed)
        self.timeline: Timeline = make_timeline(replayed, self.requests, annotations)

    def owners_at(self, moment: int) -> list[Owner]:
        """Who holds the blocks that are alive at a moment, oldest first."""
        live = self.replayed.live_at(moment)
        layers = layers_in_passes(self.replayed, self.requests, self.timeline, live)
        peak_bytes = int(self.replayed.allocated_bytes[moment])
        finder = FactFinder(
            self.replayed, self.requests, self.timeline, layers=layers, live=live, peak_bytes=peak_bytes
        )
        roles = _roles(finder, live)
        layers.update(layers_by_weights(self.replayed, self.requests, roles, layers))
        return [self._owner(block, role, layers.get(block), finder) for block, role in roles.items()]

    def _owner(self, block: int, role: Role, layer: int | None, finder: FactFinder) -> Owner:
        request = self.requests.of(block)
        return Owner(
            block=block,
            requested_bytes=int(self.replayed.requested_bytes[block]),
            role=role,
            module=request.module,
            frame=request.shown,
            phase=finder.phase(block) or Phase.OUTSIDE,
            # a library keeps its workspace for all layers, whichever was the first to need it
            layer=None if role is Role.LIBRARY_WORKSPACE else layer,
        )


def _roles(finder: FactFinder, live: Int64s) -> dict[int, Role]:
    """The role of each block; those that no rule could tell apart are looked at once."""
    known: dict[Hashable, Role] = {}
    roles = {}
    for block, signature in zip(live.tolist(), finder.signatures(), strict=True):
        role = known.get(signature)
        if role is None:
            role = known[signature] = role_of(finder.facts(block))
        roles[block] = role
    return roles


def breakdown(replayed: Replay, moment: int, owners: Sequence[Owner]) -> MemoryBreakdown:
    """Requested bytes by role; what blocks hold beyond them is the allocator's rounding."""
    roles = dict.fromkeys(Role, 0)
    for owner in owners:
        roles[owner.role] += owner.requested_bytes
    roles[Role.ALLOCATOR_ROUNDING] = int(replayed.allocated_bytes[moment]) - sum(roles.values())
    return MemoryBreakdown(roles=roles)
