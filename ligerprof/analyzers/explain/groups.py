"""Group the blocks that are live at a moment, choose those listed one by one, and say why some have no role."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ligerprof.analyzers.attribution.blocks import Attribution
from ligerprof.analyzers.attribution.owners import Owners
from ligerprof.analyzers.attribution.phases import phase_code
from ligerprof.analyzers.attribution.weights import gradients_of_passes
from ligerprof.models.architectures import without_indices
from ligerprof.roles import ROLE_CODES, Phase, Role
from ligerprof.serialization import select
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.trace import Int64s, distinct_rows, number_pairs
from ligerprof.units import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockGroup:
    """Blocks at one moment that share role, module, frame, phase, layers, operation and keeper.

    Attributes:
        size_bytes: requested bytes of all blocks.
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
        names = ("module", "frame", "phase", "layer", "layers", "operation", "kept_by", "kept_in")
        values = select(self, "role", "bytes=size_bytes", "count", *names)
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
    used, used_of = np.unique(owners.site_of, return_inverse=True)
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
    own = (owners.role_codes, owners.phase_codes, owners.layers, owners.keeper_of)
    return distinct_rows((*own, place_of, operation_of))


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


MOST_LISTED = 30_000
_MOST_AT_A_MOMENT = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockLives:
    """Some blocks of a recording.

    Attributes:
        blocks: indices into the replay's blocks, ascending.
        least_bytes: every block that requested at least this much is among them; 0 if all blocks are.
    """

    blocks: Int64s
    least_bytes: int


def list_lives(replayed: Replay, moments: Sequence[int], *, most: int = MOST_LISTED) -> BlockLives:
    """The blocks that are live at the given moments, and the `most` largest of the recording.

    Beyond a limit, only the largest blocks of a moment are listed.
    """
    sizes = replayed.requested_bytes
    count, least_bytes = len(sizes), 0
    if count > most:
        # blocks of one size are listed together or not at all
        least_bytes = int(np.partition(sizes, count - most - 1)[count - most - 1]) + 1
    chosen = [np.flatnonzero(sizes >= least_bytes)]
    for moment in moments:
        live = replayed.live_at(moment)
        chosen.append(live[np.argsort(-sizes[live], kind="stable")[:_MOST_AT_A_MOMENT]])
    blocks = np.unique(np.concatenate(chosen)).astype(np.int64)
    return BlockLives(blocks=blocks, least_bytes=least_bytes)


# reasons for less of the allocated bytes are left out
_LEAST_SHARE = 0.01
_OF_EARLIER_MODELS = "belong to models that the process built earlier, which nothing runs any more"
_BEFORE = "allocated before the recording began"
_WITHOUT_STACKS = f"{_BEFORE}, so that it has no stacks of them"


def unattributed_notes(attribution: Attribution, owners: Owners, allocated_bytes: int) -> list[str]:
    """Why blocks of some owners are unattributed, the reason with the most bytes first; and earlier models' bytes."""
    unnamed = owners.chosen(np.flatnonzero(owners.role_codes == ROLE_CODES[Role.UNATTRIBUTED]))
    is_older = unnamed.blocks < len(attribution.replayed.older_blocks)
    in_step = unnamed.phase_codes == phase_code(Phase.OPTIMIZER)
    kinds = number_pairs(unnamed.site_of, 2 * is_older.astype(np.int64) + in_step)
    _, first, kind_of = np.unique(kinds, return_index=True, return_inverse=True)
    sizes: Counter[str] = Counter()
    for place, size in zip(first.tolist(), np.bincount(kind_of, unnamed.requested_bytes).tolist(), strict=True):
        sizes[_reason(attribution, unnamed, place)] += int(size)
    known = {_WITHOUT_STACKS: _known_part(attribution, unnamed.chosen(np.flatnonzero(is_older)))}
    notes = {f"are unattributed: {reason}{known.get(reason, '')}": size for reason, size in sizes.most_common()}
    of_earlier = attribution.program.earlier_models.blocks[owners.blocks]
    notes[_OF_EARLIER_MODELS] = int(owners.requested_bytes[of_earlier].sum())
    return [f"{format_bytes(size)} {note}" for note, size in notes.items() if size > _LEAST_SHARE * allocated_bytes]


def _reason(attribution: Attribution, owners: Owners, place: int) -> str:
    owner = owners[place]
    site = owners.sites[owner.site]
    older = owner.block < len(attribution.replayed.older_blocks)
    if not site.is_known:
        return _WITHOUT_STACKS if older else "the recording has no stacks of them"
    line = site.stack.script_line
    where = f"at {owner.frame}" if owner.frame else "at a place without a name"
    where += f", called from {line}" if line and line != owner.frame else ""
    if older:
        builds = site.stack.phase is Phase.BUILD
        return f"{_BEFORE}, {where}" + (", for a model older than the one that it shows being built" if builds else "")
    if owner.phase is Phase.OPTIMIZER:
        return f"allocated {where}, in a step that the recording does not see to its end: states or temporaries"
    return f"allocated {where}, and neither the place nor their sizes show what they hold"


def _known_part(attribution: Attribution, older: Owners) -> str:
    """How many of the bytes without stacks are weights, and as large: each gradient of backward belongs to a weight."""
    held = Counter(older.requested_bytes.tolist())
    gradients = gradients_of_passes(attribution.device_blocks) if held else Counter[int]()
    weights_bytes = sum(size * min(count, held[size]) for size, count in gradients.items())
    alike_bytes = sum(size * held[size] for size in gradients) - weights_bytes
    if not weights_bytes or not alike_bytes:
        return ""
    return (
        f"; {format_bytes(weights_bytes)} of them are weights, and {format_bytes(alike_bytes)} are blocks of the same"
        " sizes, such as an optimizer's states"
    )
