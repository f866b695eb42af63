"""Decide what grew and what shrank between two peaks, by role and by group of blocks."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ligerprof.analyzers.explain.peak import BlockGroup, PeakReport
from ligerprof.roles import STEP_PHASES, Role
from ligerprof.serialization import document, select

# as in `modeling_llama.py:1214 forward`; the line changes between versions
_LINE = re.compile(r":\d+ ")


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where in training a block belongs, whatever code allocated it.

    Attributes:
        module: dotted name with the layer's index, "" if unknown.
        layer: index of the decoder layer, None outside the layers.
    """

    role: Role
    module: str
    layer: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupChange:
    """Groups of blocks at two peaks that are the same part of training.

    Attributes:
        frames_before: the frames that allocated them, the largest group first; empty if there were none.
        frames_after: the same at the second peak.
    """

    place: Place
    before_bytes: int
    after_bytes: int
    before_count: int
    after_count: int
    frames_before: tuple[str, ...]
    frames_after: tuple[str, ...]

    @property
    def difference_bytes(self) -> int:
        """Growth in bytes, negative if it shrank."""
        return self.after_bytes - self.before_bytes

    def to_json(self) -> dict[str, Any]:
        """One entry of `blocks`."""
        return select(
            self,
            *("place.role", "place.module", "place.layer", "before_bytes", "after_bytes", "difference_bytes"),
            *("before_count", "after_count", "frames_before", "frames_after"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakDiff:
    """Two peaks and their differences.

    Attributes:
        groups: the largest change first, unchanged groups too; with the change of
            allocator_rounding they add up to the difference of the peaks.
        notes: one sentence each.
    """

    before: PeakReport
    after: PeakReport
    groups: tuple[GroupChange, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def difference_bytes(self) -> int:
        """Growth of the peak in bytes."""
        return self.after.peak_bytes - self.before.peak_bytes

    def role_difference_bytes(self, role: Role) -> int:
        """Growth of a role in bytes; all roles add up to the difference of the peaks."""
        return self.after.roles[role] - self.before.roles[role]

    def to_json(self) -> dict[str, Any]:
        """The object of `ligerprof diff --json`."""
        return document(
            "diff",
            {"before": _peak_json(self.before), "after": _peak_json(self.after)},
            {
                "difference_bytes": self.difference_bytes,
                "reserved_difference_bytes": self.after.reserved_bytes - self.before.reserved_bytes,
                "roles": {role.value: _change_json(self.before.roles[role], self.after.roles[role]) for role in Role},
                "phases": {
                    phase.value: _change_json(self.before.phases[phase], self.after.phases[phase])
                    for phase in STEP_PHASES
                    if phase in self.before.phases and phase in self.after.phases
                },
            },
            select(self, "blocks=groups", "notes"),
        )


def diff_peaks(before: PeakReport, after: PeakReport) -> PeakDiff:
    """Match the block groups of two peaks and subtract them.

    Groups match if role, module and layer do: a replaced class keeps its place in the model. Within
    a place they match by the file and function that allocated them, then by the function alone,
    without lines; what remains under one module's name on both sides is one part that was
    replaced. If one of the peaks has no module names, layers and functions decide.
    """
    with_modules = all(any(block.module for block in report.blocks) for report in (before, after))
    pairs = [_by_place(report.blocks, with_modules=with_modules) for report in (before, after)]
    groups: list[GroupChange] = []
    for place in dict.fromkeys([*pairs[0], *pairs[1]]):
        matched = _match(pairs[0].get(place, []), pairs[1].get(place, []), one_part=_is_one_part(place))
        groups.extend(_change(place, mine, theirs) for mine, theirs in matched)
    # sort is stable: unchanged groups stay ordered by size
    groups.sort(key=lambda group: -max(group.before_bytes, group.after_bytes))
    groups.sort(key=lambda group: -abs(group.difference_bytes))
    return PeakDiff(
        before=before, after=after, groups=tuple(groups), notes=tuple(_notes(before, after, with_modules=with_modules))
    )


def _by_place(blocks: Iterable[BlockGroup], *, with_modules: bool) -> dict[Place, list[BlockGroup]]:
    places: dict[Place, list[BlockGroup]] = defaultdict(list)
    for block in blocks:
        module = block.module if with_modules else ""
        places[Place(role=block.role, module=module, layer=block.layer)].append(block)
    return places


Matched = tuple[list[BlockGroup], list[BlockGroup]]


def _is_one_part(place: Place) -> bool:
    """Whether a place is one part whatever code allocated it: a module's, or a library's workspace."""
    return bool(place.module) or place.role is Role.LIBRARY_WORKSPACE


def _match(before: Sequence[BlockGroup], after: Sequence[BlockGroup], *, one_part: bool) -> Iterator[Matched]:
    """Pair the groups of one place; each is in exactly one pair, one side of which may be empty."""
    left, right = list(before), list(after)
    for same in (_file_and_function, _function):
        shared = {same(block) for block in left} & {same(block) for block in right}
        for key in sorted(shared):
            yield [block for block in left if same(block) == key], [block for block in right if same(block) == key]
        left = [block for block in left if same(block) not in shared]
        right = [block for block in right if same(block) not in shared]
    if one_part and left and right:
        yield left, right
        return
    yield from (([block], []) for block in left)
    yield from (([], [block]) for block in right)


def _file_and_function(block: BlockGroup) -> str:
    return _LINE.sub(" ", block.frame)


def _function(block: BlockGroup) -> str:
    return block.frame.rpartition(" ")[2]


def _change(place: Place, before: Sequence[BlockGroup], after: Sequence[BlockGroup]) -> GroupChange:
    return GroupChange(
        place=place,
        before_bytes=_total(before, lambda block: block.size_bytes),
        after_bytes=_total(after, lambda block: block.size_bytes),
        before_count=_total(before, lambda block: block.count),
        after_count=_total(after, lambda block: block.count),
        frames_before=_frames(before),
        frames_after=_frames(after),
    )


def _total(blocks: Sequence[BlockGroup], figure: Callable[[BlockGroup], int]) -> int:
    return sum(figure(block) for block in blocks)


def _frames(blocks: Sequence[BlockGroup]) -> tuple[str, ...]:
    largest_first = sorted(blocks, key=lambda block: -block.size_bytes)
    return tuple(dict.fromkeys(block.frame for block in largest_first if block.frame))


def _notes(before: PeakReport, after: PeakReport, *, with_modules: bool) -> Iterator[str]:
    for name, report in (("first", before), ("second", after)):
        yield from (f"{name} snapshot: {note}" for note in report.notes)
    named = any(block.module for report in (before, after) for block in report.blocks)
    if named and not with_modules:
        yield "only one of the snapshots has module names: blocks are matched by role, layer and function"


def _peak_json(report: PeakReport) -> dict[str, Any]:
    return select(report, "device", "peak_bytes", "reserved_bytes", "complete", "peak_phase")


def _change_json(before_bytes: int, after_bytes: int) -> dict[str, int]:
    return {
        "before_bytes": before_bytes,
        "after_bytes": after_bytes,
        "difference_bytes": after_bytes - before_bytes,
    }
