"""What the computation of each suggestion reads: the replay, roles, passes of layers, and facts about the program."""

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from ligerprof.analyzers.attribution import frames
from ligerprof.analyzers.attribution.blocks import Attribution
from ligerprof.analyzers.attribution.phases import are_codes_of, phase_code
from ligerprof.analyzers.suggestions.layer_passes import LayerPasses, find_passes
from ligerprof.analyzers.suggestions.program import Program, read_program
from ligerprof.analyzers.suggestions.replayed_change import Edit, Request, RoleBook, Window, find_request
from ligerprof.roles import Phase, Role
from ligerprof.snapshots.distinct import distinct, is_among
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.trace import Int64s

FoundT = TypeVar("FoundT")

# the first steps differ from each other, later ones do not
_LEARNED_SPANS = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A recording whose peak is to be lowered.

    Attributes:
        attribution: of the recording, up to the failure if memory ran out.
        whole: of the whole recording, which shows what the program does.
        window: the moments that are searched for the peak.
        peak_moment: the moment of the recorded peak.
        failed: the event of the allocation that failed, None if all succeeded.
    """

    attribution: Attribution
    whole: Attribution
    window: Window
    peak_moment: int
    failed: int | None = None
    _found: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @property
    def replayed(self) -> Replay:
        """The replayed device."""
        return self.attribution.replayed

    @cached_property
    def program(self) -> Program:
        """What the stacks show about the program."""
        return read_program(self.whole)

    @cached_property
    def request(self) -> Request | None:
        """The allocation that failed."""
        return None if self.failed is None else find_request(self.attribution, self.failed, self.peak_moment)

    @cached_property
    def book(self) -> RoleBook:
        """The roles of blocks."""
        return RoleBook(self.attribution, self.peak_moment)

    @cached_property
    def passes(self) -> LayerPasses:
        """The forward passes of layers."""
        return find_passes(self.replayed, self.attribution.phases, self.attribution.layers)

    @cached_property
    def trains_model(self) -> bool:
        """Whether backward runs in the recording, or would have run if memory had not run out in the first forward."""
        if (self.whole.phases.codes == phase_code(Phase.BACKWARD)).any():
            return True
        ran_once = len(self.spans_of_phase(Phase.FORWARD)) == 1
        return self.request is not None and ran_once and not self.program.generates

    @cached_property
    def backwards(self) -> list[tuple[int, int]]:
        """First event and end of each backward phase.

        Without stamps or annotations, the phase ends after its last allocation: the frees that follow may belong to
        the optimizer step.
        """
        events, spans = self.replayed.allocated_by, self.spans_of_phase(Phase.BACKWARD)
        if self.attribution.phases.stamped or len(self.attribution.phases.optimizer_starts):
            return spans
        return [(start, int(events[np.searchsorted(events, end) - 1]) + 1) for start, end in spans]

    @cached_property
    def gradients(self) -> Int64s:
        """The blocks of gradients: those that are live where backward phases end."""
        for _, end in self.backwards[:_LEARNED_SPANS]:
            self.book.learn(end)
        return self.book.blocks(Role.GRADIENTS)

    @cached_property
    def evaluation(self) -> Int64s:
        """Blocks that an evaluation or a generation allocated, by a recorder's stamps or the calls of a trainer."""
        shown = self.attribution.phases.shown_of(self.replayed.allocated_by)
        stamped = np.flatnonzero(are_codes_of(shown, Phase.GENERATION, Phase.EVALUATION)).astype(np.int64)
        return distinct(np.append(stamped, self.blocks_from(frames.EVALUATION))) if self.program.evaluates else stamped

    def in_training(self, *roles: Role) -> Int64s:
        """The blocks of some roles that no evaluation allocated."""
        blocks = self.book.blocks(*roles)
        return blocks[~is_among(blocks, self.evaluation)] if len(self.evaluation) else blocks

    def edit(self) -> Edit:
        """An empty edit of the replay."""
        return Edit(self.replayed)

    def once(self, find: Callable[..., FoundT], *arguments: Hashable) -> FoundT:
        """The result of `find(self, *arguments)`, kept: a change is made until the roles at its peak are known."""
        key = (find, *arguments)
        if key not in self._found:
            self._found[key] = find(self, *arguments)
        found: FoundT = self._found[key]
        return found

    def without(self, *roles: Role) -> Edit:
        """An edit that removes every block of some roles, except those of evaluations."""
        edit = self.edit()
        edit.remove(self.in_training(*roles))
        if self.request is not None and self.request.role in roles:
            edit.request_divisor = 0
        return edit

    def spans_of_phase(self, phase: Phase) -> list[tuple[int, int]]:
        """First event and end of each span of a phase."""
        phases = self.attribution.phases
        starts = phases.span_starts
        ends = np.append(starts[1:], len(phases.spans))
        chosen = phases.codes[starts] == phase_code(phase)
        return list(zip(starts[chosen].tolist(), ends[chosen].tolist(), strict=True))

    def allocated_within(self, blocks: Int64s, start: int, end: int) -> Int64s:
        """Those of the ascending blocks that events from `start` up to `end` allocated."""
        return blocks[slice(*np.searchsorted(blocks, np.searchsorted(self.replayed.allocated_by, (start, end))))]

    def blocks_from(self, pattern: str) -> Int64s:
        """Blocks whose stack has a call, as `file:function`, that matches a regular expression."""
        sites = self.attribution.call_sites
        found = [re.search(pattern, site.stack.text, re.MULTILINE) is not None for site in sites.sites]
        return np.flatnonzero(np.array(found, dtype=bool)[sites.site_of]).astype(np.int64)

    def sizes(self, blocks: Int64s | Sequence[int]) -> Int64s:
        """Requested bytes of blocks."""
        return self.replayed.requested_bytes[blocks]
