"""Give every block alive at a moment its role, module, frame, phase and layer."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from ligerprof.analyzers.attribution.call_sites import Requests
from ligerprof.analyzers.attribution.features import FactFinder
from ligerprof.analyzers.attribution.layers import NO_LAYER, layers_by_weights, layers_in_passes
from ligerprof.analyzers.attribution.phases import Timeline, make_timeline
from ligerprof.analyzers.attribution.rules import role_of
from ligerprof.analyzers.attribution.user_rules import OwnRule
from ligerprof.roles import MemoryBreakdown, Phase, Role
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.trace import Int64s


class Owner(NamedTuple):
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
        own_rules: asked before the built-in ones.

    Attributes:
        replayed: the device.
        requests: who asked for each block.
        timeline: the phase of each event.
    """

    def __init__(
        self,
        replayed: Replay,
        annotations: Sequence[Mapping[str, Any]] = (),
        own_rules: Sequence[OwnRule] = (),
    ) -> None:
        self.replayed = replayed
        self._own_rules = own_rules
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
        roles = dict(zip(live.tolist(), find_roles(finder, live, self._own_rules), strict=True))
        by_weights = layers_by_weights(self.replayed, self.requests, roles, layers)
        layers[list(by_weights)] = list(by_weights.values())
        kinds = self.requests.kind_of[live].tolist()
        named = {kind: (self.requests.kinds[kind].module, self.requests.kinds[kind].shown) for kind in set(kinds)}
        sizes, layer_of = self.replayed.requested_bytes[live].tolist(), layers[live].tolist()
        return [
            Owner(block, size, role, *named[kind], phase or Phase.OUTSIDE, _shown_layer(layer, role))
            for (block, role), size, kind, phase, layer in zip(
                roles.items(), sizes, kinds, finder.phases(live), layer_of, strict=True
            )
        ]


def _shown_layer(layer: int, role: Role) -> int | None:
    # a library keeps its workspace for all layers, whichever was the first to need it
    return None if layer == NO_LAYER or role is Role.LIBRARY_WORKSPACE else layer


def find_roles(finder: FactFinder, blocks: Int64s, own_rules: Sequence[OwnRule] = ()) -> list[Role]:
    """The role of each block; those that no rule could tell apart are looked at once."""
    known: dict[Hashable, Role] = {}
    roles = []
    for block, signature in zip(blocks.tolist(), finder.signatures(blocks), strict=True):
        role = known.get(signature)
        if role is None:
            facts = finder.facts(block)
            own = (rule.role for rule in own_rules if rule.matches(facts))
            role = known[signature] = next(own, None) or role_of(facts)
        roles.append(role)
    return roles


def breakdown(replayed: Replay, moment: int, owners: Sequence[Owner]) -> MemoryBreakdown:
    """Requested bytes by role; what blocks hold beyond them is the allocator's rounding."""
    roles = dict.fromkeys(Role, 0)
    for owner in owners:
        roles[owner.role] += owner.requested_bytes
    roles[Role.ALLOCATOR_ROUNDING] = int(replayed.allocated_bytes[moment]) - sum(roles.values())
    return MemoryBreakdown(roles=roles)
