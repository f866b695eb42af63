"""Attribute blocks: give each block that is live at a moment its role, module, frame, phase and layer."""

from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ligerprof.analyzers.attribution.extraction import FeatureExtractor, ProgramFrames
from ligerprof.analyzers.attribution.layers import NO_LAYER, with_layers_of_weights
from ligerprof.analyzers.attribution.owners import CHECKPOINT, Keepers, Owners
from ligerprof.analyzers.attribution.phases import DeviceBlocks, find_phases, phase_code
from ligerprof.analyzers.attribution.rules import UserRule, role_of
from ligerprof.analyzers.attribution.stacks import CallSites
from ligerprof.roles import ROLE_CODES, ROLES, MemoryBreakdown, Phase, Role
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.stamp import SavedTensor
from ligerprof.snapshots.trace import Int64s


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
        self.device_blocks = DeviceBlocks(replayed, self.call_sites, self.phases)
        self._keepers = Keepers(self.device_blocks, saved_tensors)
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
        noted = ((note, note.get("time_us")) for note in self._annotations)
        return [note for note, time in noted if not isinstance(time, int) or time <= times[moment]]

    def owners_at(self, moment: int) -> Owners:
        """The owners of the blocks that are live at a moment, oldest first."""
        return self.owners_of(self.replayed.live_at(moment), moment)

    def owners_of(self, blocks: Int64s, moment: int) -> Owners:
        """The owners of some blocks, based on their features as seen from `moment`."""
        finder, sites = self._finder_at(moment), self.call_sites
        codes = finder.role_codes(blocks)
        layers = with_layers_of_weights(self.replayed, sites, blocks, codes, self.program.layers)[blocks]
        # a library keeps its workspace for all layers, not only for the one that first needed it
        layers[codes == ROLE_CODES[Role.LIBRARY_WORKSPACE]] = NO_LAYER
        phase_codes = finder.extractor.phase_codes(blocks)
        phase_codes[phase_codes == phase_code(None)] = phase_code(Phase.OUTSIDE)
        keeper_of, keepers = self._keepers.of(blocks, moment)
        is_checkpoint = codes == ROLE_CODES[Role.CHECKPOINTS]
        keeper_of[is_checkpoint] += len(keepers)
        return Owners(
            blocks=blocks,
            requested_bytes=self.replayed.requested_bytes[blocks],
            role_codes=codes,
            phase_codes=phase_codes,
            layers=layers,
            site_of=sites.site_of[blocks],
            keeper_of=keeper_of,
            sites=sites.sites,
            # the node that releases a checkpoint only ran last
            keepers=[*keepers, *(keeper._replace(name=CHECKPOINT, place="") for keeper in keepers)],
        )

    def role_codes_of(self, blocks: Int64s, moment: int) -> Int64s:
        """Index in `ROLES` of each block's role, based on its features as seen from `moment`."""
        return self._finder_at(moment).role_codes(blocks)

    def roles_of(self, blocks: Int64s, moment: int) -> list[Role]:
        """The role of each block, based on its features as seen from `moment`."""
        return [ROLES[code] for code in self.role_codes_of(blocks, moment).tolist()]

    def breakdown(self, moment: int, owners: Owners) -> MemoryBreakdown:
        """Requested bytes by role; the rest of the allocated bytes is the allocator's rounding."""
        roles = {**dict.fromkeys(Role, 0), **owners.bytes_by_role()}
        roles[Role.ALLOCATOR_ROUNDING] = int(self.replayed.allocated_bytes[moment]) - sum(roles.values())
        return MemoryBreakdown(roles=roles)

    def _finder_at(self, moment: int) -> "_RoleFinder":
        if moment not in self._at_moment:
            extractor = FeatureExtractor(self.device_blocks, program=self.program, moment=moment)
            self._at_moment[moment] = _RoleFinder(extractor, self._user_rules)
        return self._at_moment[moment]

    @cached_property
    def program(self) -> ProgramFrames:
        """What the whole recording shows of each block: its layer, and models that the process built earlier."""
        return ProgramFrames(self.device_blocks)


class _RoleFinder:
    """Finds the roles of blocks; blocks with equal features are matched against the rules once."""

    def __init__(self, extractor: FeatureExtractor, user_rules: Sequence[UserRule]) -> None:
        self.extractor = extractor
        self._user_rules = user_rules
        self._known: dict[Hashable, Role] = {}

    def role_codes(self, blocks: Int64s) -> Int64s:
        """Index in `ROLES` of each block's role."""
        firsts, signatures, kinds = self.extractor.signatures(blocks)
        found = [ROLE_CODES[self._role(*kind)] for kind in zip(firsts.tolist(), signatures, strict=True)]
        return np.array(found, dtype=np.int64)[kinds]

    def _role(self, block: int, signature: Hashable) -> Role:
        role = self._known.get(signature)
        if role is None:
            features = self.extractor.features(block)
            by_user = (rule.role for rule in self._user_rules if rule.matches(features))
            role = self._known[signature] = next(by_user, None) or role_of(features)
        return role
