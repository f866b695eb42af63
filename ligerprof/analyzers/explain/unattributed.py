"""Say why memory has no role: what the recording lacks, in a sentence for each reason."""

from collections import Counter

import numpy as np

from ligerprof.analyzers.attribution.blocks import Attribution
from ligerprof.analyzers.attribution.older_weights import gradients_of_passes
from ligerprof.analyzers.attribution.owners import Owners
from ligerprof.analyzers.attribution.phases import phase_code
from ligerprof.roles import ROLE_CODES, Phase, Role
from ligerprof.snapshots.distinct import number_pairs
from ligerprof.units import format_bytes

# reasons for less of the allocated bytes are left out
_LEAST_SHARE = 0.01
_OF_EARLIER_MODELS = "belong to models that the process built earlier, which nothing runs any more"
_BEFORE = "allocated before the recording began"
_WITHOUT_STACKS = f"{_BEFORE}, so that it has no stacks of them"


def unattributed_notes(attribution: Attribution, owners: Owners, allocated_bytes: int) -> list[str]:
    """Why blocks of some owners are unattributed, the reason with the most bytes first; and earlier models' bytes."""
    unnamed = owners.chosen(np.flatnonzero(owners.role_codes == ROLE_CODES[Role.UNATTRIBUTED]).astype(np.int64))
    is_older = unnamed.blocks < len(attribution.replayed.older_blocks)
    in_step = unnamed.phase_codes == phase_code(Phase.OPTIMIZER)
    kinds = number_pairs(unnamed.site_of, 2 * is_older.astype(np.int64) + in_step)
    _, first, kind_of = np.unique(kinds, return_index=True, return_inverse=True)
    sizes: Counter[str] = Counter()
    for place, size in zip(first.tolist(), np.bincount(kind_of, unnamed.requested_bytes).tolist(), strict=True):
        sizes[_reason(attribution, unnamed, place)] += int(size)
    known = {_WITHOUT_STACKS: _known_part(attribution, unnamed.chosen(np.flatnonzero(is_older).astype(np.int64)))}
    notes = {f"are unattributed: {reason}{known.get(reason, '')}": size for reason, size in sizes.most_common()}
    of_earlier = attribution.earlier_models.blocks[owners.blocks]
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
    gradients = gradients_of_passes(attribution.replayed, attribution.phases) if held else Counter[int]()
    weights_bytes = sum(size * min(count, held[size]) for size, count in gradients.items())
    alike_bytes = sum(size * held[size] for size in gradients) - weights_bytes
    if not weights_bytes or not alike_bytes:
        return ""
    return (
        f"; {format_bytes(weights_bytes)} of them are weights, and {format_bytes(alike_bytes)} are blocks of the same"
        " sizes, such as an optimizer's states"
    )
