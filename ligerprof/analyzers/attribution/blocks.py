"""Attribute blocks: give each block that is live at a moment its role, module, frame, phase and layer."""

from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

from ligerprof.analyzers.attribution.call_sites import CallSites
from ligerprof.analyzers.attribution.extraction import FeatureExtractor
from ligerprof.analyzers.attribution.keepers import Keeper, Keepers
from ligerprof.analyzers.attribution.layers import NO_LAYER, with_layers_of_weights
from ligerprof.analyzers.attribution.phases import find_phases
from ligerprof.analyzers.attribution.program import Program
from ligerprof.analyzers.attribution.rules import role_of
from ligerprof.analyzers.attribution.user_rules import UserRule
from ligerprof.roles import MemoryBreakdown, Phase, Role
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.saved import SavedTensor
from ligerprof.snapshots.trace import Int64s


class Owner(NamedTuple):
    """The role and origin of one block.

    Attributes:
        block: its index in the replay.
        module: dotted module name, "" if unknown.
        frame: the Python call or autograd node that allocated it, or "".
        layer: index of the decoder layer, None outside the layers or if unknown.
        site: index of its call site in `Attribution.call_sites.sites`.
        operation: the torch operator, Python function or autograd node that allocated it, or "".
        keeper: what keeps it alive.
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


class Attribution:
    """Call sites, phases and roles of a replayed device's blocks, each determined once.

    Args:
        annotations: the snapshot's `external_annotations`.
        user_rules: take precedence over the built-in rules.
        saved_tensors: the snapshot's.
    """

    def __init__(
        self,
        replayed: Replay,
        annotations: Sequence[Mapping[str, Any]] = (),
        user_rules: Sequence[UserRule] = (),
        saved_tensors: Sequence[SavedTensor] = (),
    ) -> None:
        self.replayed = replayed
        self.call_sites = CallSites(replayed)
        self.phases = find_phases(replayed, self.call_sites, annotations)
        self._keepers = Keepers(replayed, self.call_sites, self.phases, saved_tensors)
        self._annotations, self._saved_tensors = annotations, saved_tensors
        self._user_rules = user_rules
        self._at_moment: dict[int, _RoleFinder] = {}
        self._cut: dict[int, Attribution] = {}

    def until(self, moment: int) -> "Attribution":
        """The attribution of the recording as it would be if it ended at a moment; blocks keep their indices."""
        replayed = self.replayed
        if not ((replayed.allocated_by >= moment).any() or (replayed.freed_by >= moment).any()):
            return self
        if moment not in self._cut:
            self._cut[moment] = Attribution(
                replayed.until(moment), self._annotations_until(moment), self._user_rules, self._saved_tensors
            )
        return self._cut[moment]

    def _annotations_until(self, moment: int) -> Sequence[Mapping[str, Any]]:
        """The annotations up to the first event that a moment leaves out."""
        times = self.replayed.trace.numbers("time_us")
        if moment >= len(times):
            return self._annotations
        end = int(times[moment])
        return [note for note in self._annotations if not _is_after(note.get("time_us"), end)]

    def owners_at(self, moment: int) -> list[Owner]:
        """The owners of the blocks that are live at a moment, oldest first."""
        return self.owners_of(self.replayed.live_at(moment), moment)

    def owners_of(self, blocks: Int64s, moment: int) -> list[Owner]:
        """The owners of some blocks, based on their features as seen from `moment`."""
        finder, sites = self._finder_at(moment), self.call_sites
        roles = finder.roles(blocks)
        layers = with_layers_of_weights(self.replayed, sites, blocks, roles, self.layers)
        site_of = sites.site_of[blocks].tolist()
        used = {site: sites.sites[site] for site in set(site_of)}
        modules = {site: used[site].module for site in used}
        frames = {site: used[site].description for site in used}
        operations = {site: used[site].operation for site in used}
        keepers = self._keepers.of(blocks, moment)
        # in the order of the fields, column by column: there may be a million blocks
        columns = (
            blocks.tolist(),
            self.replayed.requested_bytes[blocks].tolist(),
            roles,
            [modules[site] for site in site_of],
            [frames[site] for site in site_of],
            [phase or Phase.OUTSIDE for phase in finder.extractor.phases(blocks)],
            map(_layer, layers[blocks].tolist(), roles),
            site_of,
            [keeper.operation or operations[site] for keeper, site in zip(keepers, site_of, strict=True)],
            [
                keeper.of_checkpoint() if role is Role.CHECKPOINTS else keeper
                for keeper, role in zip(keepers, roles, strict=True)
            ],
        )
        # `Owner._make` is a Python function, which takes three times as long
        return list(map(partial(tuple.__new__, Owner), zip(*columns, strict=True)))

    def roles_of(self, blocks: Int64s, moment: int) -> list[Role]:
        """The role of each block, based on its features as seen from `moment`."""
        return self._finder_at(moment).roles(blocks)

    def breakdown(self, moment: int, owners: Sequence[Owner]) -> MemoryBreakdown:
        """Requested bytes by role; the rest of the allocated bytes is the allocator's rounding."""
        roles = dict.fromkeys(Role, 0)
        for owner in owners:
            roles[owner.role] += owner.requested_bytes
        roles[Role.ALLOCATOR_ROUNDING] = int(self.replayed.allocated_bytes[moment]) - sum(roles.values())
        return MemoryBreakdown(roles=roles)

    def _finder_at(self, moment: int) -> "_RoleFinder":
        if moment not in self._at_moment:
            extractor = FeatureExtractor(
                self.replayed, self.call_sites, self.phases, program=self._program, moment=moment
            )
            self._at_moment[moment] = _RoleFinder(extractor, self._user_rules)
        return self._at_moment[moment]

    @property
    def layers(self) -> Int64s:
        """The layer of each block that forward or backward allocated, -1 if unknown."""
        return self._program.layers

    @cached_property
    def _program(self) -> Program:
        return Program(self.replayed, self.call_sites, self.phases)


class _RoleFinder:
    """Finds the roles of blocks; blocks with equal features are matched against the rules once."""

    def __init__(self, extractor: FeatureExtractor, user_rules: Sequence[UserRule]) -> None:
        self.extractor = extractor
        self._user_rules = user_rules
        self._known: dict[Hashable, Role] = {}

    def roles(self, blocks: Int64s) -> list[Role]:
        firsts, signatures, kinds = self.extractor.signatures(blocks)
        found = [self._role(*kind) for kind in zip(firsts.tolist(), signatures, strict=True)]
        return [found[kind] for kind in kinds]

    def _role(self, block: int, signature: Hashable) -> Role:
        role = self._known.get(signature)
        if role is None:
            features = self.extractor.features(block)
            by_user = (rule.role for rule in self._user_rules if rule.matches(features))
            role = self._known[signature] = next(by_user, None) or role_of(features)
        return role


def _is_after(time_us: object, end_us: int) -> bool:
    return isinstance(time_us, int) and time_us > end_us


def _layer(layer: int, role: Role) -> int | None:
    # a library keeps its workspace for all layers, not only for the one that first needed it
    return None if layer == NO_LAYER or role is Role.LIBRARY_WORKSPACE else layer
