"""Say why memory has no role: what the recording lacks, in a sentence for each reason."""

from collections import Counter
from collections.abc import Iterable, Sequence

from ligerprof.analyzers.attribution.blocks import Attribution, Owner
from ligerprof.analyzers.attribution.older_weights import gradients_of_passes
from ligerprof.roles import Phase, Role
from ligerprof.units import format_bytes

# reasons for less of the allocated bytes are left out
_LEAST_SHARE = 0.01


def unattributed_notes(attribution: Attribution, owners: Sequence[Owner], allocated_bytes: int) -> list[str]:
    """Why blocks of some owners are unattributed, the reason with the most bytes first."""
    sizes: Counter[str] = Counter()
    unnamed = [owner for owner in owners if owner.role is Role.UNATTRIBUTED]
    # thousands of blocks share a few places
    for owner in unnamed:
        sizes[_reason(attribution, owner)] += owner.requested_bytes
    return [
        f"{format_bytes(size)} are unattributed: {reason}{_known_part(attribution, unnamed, reason)}"
        for reason, size in sizes.most_common()
        if size > _LEAST_SHARE * allocated_bytes
    ]


_BEFORE = "allocated before the recording began"
_WITHOUT_STACKS = f"{_BEFORE}, so that it has no stacks of them"


def _reason(attribution: Attribution, owner: Owner) -> str:
    site = attribution.call_sites.sites[owner.site]
    older = owner.block < len(attribution.replayed.older_blocks)
    if not site.is_known:
        return _WITHOUT_STACKS if older else "the recording has no stacks of them"
    line = site.stack.script_line
    place = f"at {owner.frame}" if owner.frame else "at a place without a name"
    place += f", called from {line}" if line and line != owner.frame else ""
    if older:
        builds = site.stack.phase is Phase.BUILD
        return f"{_BEFORE}, {place}" + (
            ", for a model older than the one that the recording shows being built" if builds else ""
        )
    if owner.phase is Phase.OPTIMIZER:
        return f"allocated {place}, in a step that the recording does not see to its end: states or temporaries"
    return f"allocated {place}, and neither the place nor their sizes show what they hold"


def _known_part(attribution: Attribution, owners: Iterable[Owner], reason: str) -> str:
    """How many of the bytes without stacks are weights: each gradient that backward leaves belongs to one."""
    if reason != _WITHOUT_STACKS:
        return ""
    held = Counter(owner.requested_bytes for owner in owners if owner.block < len(attribution.replayed.older_blocks))
    gradients = gradients_of_passes(attribution.replayed, attribution.phases)
    weights_bytes = sum(size * min(count, held[size]) for size, count in gradients.items())
    if not weights_bytes:
        return ""
    return f"; {format_bytes(weights_bytes)} of them are weights, but blocks as large as these hold other things too"
