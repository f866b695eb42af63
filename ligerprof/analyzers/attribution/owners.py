"""The owners of blocks as columns: what each block is, who allocated it, and what keeps it alive."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, overload

import numpy as np

from ligerprof.analyzers.attribution.call_sites import CallSite
from ligerprof.analyzers.attribution.keepers import Keeper
from ligerprof.analyzers.attribution.layers import NO_LAYER
from ligerprof.analyzers.attribution.phases import phase_of_code
from ligerprof.roles import ROLES, Phase, Role
from ligerprof.snapshots.trace import Int64s

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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Owners(Sequence[Owner]):
    """The owners of some blocks, since a moment can have hundreds of thousands; an `Owner` is made on access.

    Attributes:
        blocks: indices in the replay.
        role_codes: index in `ROLES` of each block's role.
        phase_codes: `phase_code` of each block's phase; `outside` if unknown.
        layers: NO_LAYER outside the layers or if unknown.
        site_of: index into `sites` of each block.
        keeper_of: index into `keepers` of each block.
        sites: call sites of the attribution.
        keepers: the distinct keepers.
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

    @overload
    def __getitem__(self, index: int) -> Owner: ...

    @overload
    def __getitem__(self, index: slice) -> "Owners": ...

    def __getitem__(self, index: int | slice) -> "Owner | Owners":
        if isinstance(index, slice):
            return self.chosen(np.arange(len(self), dtype=np.int64)[index])
        return next(iter(self.chosen(np.array([index], dtype=np.int64))))

    def __iter__(self) -> Iterator[Owner]:
        site_of, roles = self.site_of.tolist(), [ROLES[code] for code in self.role_codes.tolist()]
        used = {site: self.sites[site] for site in set(site_of)}
        modules = {site: used[site].module for site in used}
        frames = {site: used[site].description for site in used}
        operations = {site: used[site].operation for site in used}
        keepers = [self.keepers[number] for number in self.keeper_of.tolist()]
        # in the order of the fields, column by column: there may be a million blocks
        columns = (
            self.blocks.tolist(),
            self.requested_bytes.tolist(),
            roles,
            [modules[site] for site in site_of],
            [frames[site] for site in site_of],
            map(phase_of_code, self.phase_codes.tolist()),
            [None if layer == NO_LAYER else layer for layer in self.layers.tolist()],
            site_of,
            [keeper.operation or operations[site] for keeper, site in zip(keepers, site_of, strict=True)],
            keepers,
        )
        # `Owner._make` is a Python function, which takes three times as long
        return map(partial(tuple.__new__, Owner), zip(*columns, strict=True))

    def chosen(self, places: Int64s) -> "Owners":
        """Some of the owners."""
        columns = {name: getattr(self, name)[places] for name in _COLUMNS}
        return Owners(**columns, sites=self.sites, keepers=self.keepers)

    def bytes_by_role(self) -> dict[Role, int]:
        """Requested bytes of each role that occurs, in the order in which the roles appear."""
        sums = np.zeros(len(ROLES), dtype=np.int64)
        np.add.at(sums, self.role_codes, self.requested_bytes)
        return {ROLES[code]: int(sums[code]) for code in dict.fromkeys(self.role_codes.tolist())}
