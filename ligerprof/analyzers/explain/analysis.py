"""Analyze one device of a snapshot: read, replay and attribute it once, then derive every result."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ligerprof.analyzers.attribution.blocks import Attribution
from ligerprof.analyzers.attribution.owners import Owners
from ligerprof.analyzers.attribution.rules import UserRule
from ligerprof.analyzers.explain.alloc_settings import SettingsOutcome, other_settings, with_settings
from ligerprof.analyzers.explain.groups import (
    MOST_LISTED,
    BlockGroup,
    BlockLives,
    group_blocks,
    list_lives,
    unattributed_notes,
)
from ligerprof.analyzers.explain.peak import PeakReport
from ligerprof.analyzers.explain.steps import Growth, find_growth, step_peaks, step_starts
from ligerprof.analyzers.explain.timeline import MOST_COLUMNS, RoleTimeline, role_timeline
from ligerprof.analyzers.suggestions.case import Case, Framework, Window
from ligerprof.analyzers.suggestions.find import bytes_after, find_suggestions
from ligerprof.analyzers.suggestions.rows import Suggestion
from ligerprof.errors import EmptySnapshotError, SnapshotFormatError
from ligerprof.roles import REPORTED_PHASES, STEP_PHASES, Phase
from ligerprof.snapshots.collector import collector_paused
from ligerprof.snapshots.reader import Snapshot, read_snapshot
from ligerprof.snapshots.replay import Replay, replay
from ligerprof.snapshots.trace import Int64s
from ligerprof.units import format_bytes

if TYPE_CHECKING:
    from ligerprof.analyzers.explain.failure import FailedAllocation
    from ligerprof.recipe.training import TrainingRecipe

# fewer steps that add memory may still fill caches
_LEAST_STEPS = 3


class SnapshotAnalysis:
    """One device of a snapshot, replayed and attributed; each result is computed on first use and kept.

    Attributes:
        window: the moments that are searched for the peak: of the step that was asked for, or of all steps but those
            whose allocations have no calls. A recording of chosen steps has such steps before these, to show what one
            step leaves to the next; too little is known of their blocks to name or to change them.
        peak_moment: the first moment of the highest allocated bytes in the window.
    """

    def __init__(  # noqa: PLR0913 - one argument per option
        self,
        replayed: Replay,
        attribution: Attribution,
        *,
        step: int | None,
        stacks: bool,
        notes: Sequence[str],
        recipe: "TrainingRecipe | None" = None,
        all_settings: bool = False,
        left_out: Mapping[Phase, int] | None = None,
    ) -> None:
        self.replayed = replayed
        self._left_out = left_out or {}
        self.attribution = attribution
        self._step = step
        self._stacks = stacks
        self._recipe = recipe
        self._thorough = all_settings
        self._device_notes = notes
        self.window = self._find_window()
        place = int(np.argmax(replayed.allocated_bytes[self.window]))
        self.peak_moment = place if isinstance(self.window, slice) else int(self.window[place])

    @cached_property
    def peak(self) -> PeakReport:
        """What the memory at the peak belongs to."""
        with collector_paused():
            replayed, phases, moment = self.replayed, self.attribution.phases, self.peak_moment
            return PeakReport(
                device=replayed.device,
                peak_bytes=int(replayed.allocated_bytes[moment]),
                reserved_bytes=int(replayed.reserved_bytes[self.window].max()),
                complete=replayed.complete,
                roles=self.attribution.breakdown(moment, self._owners),
                blocks=self.group(self._owners),
                phases=self._phase_peaks(),
                peak_phase=phases.shown_at(moment - 1) if moment else None,
                peak_step=phases.step_at(moment - 1) if moment else None,
                notes=(*self._device_notes, *self._replay_notes(), *self._higher_notes(), *self._unattributed_notes()),
                steps=step_peaks(phases, replayed),
                out_of_memory=self.out_of_memory,
                suggestions=self.suggestions,
                growth=self._growth(),
                alloc_confs=self.alloc_confs,
            )

    @cached_property
    def out_of_memory(self) -> "FailedAllocation | None":
        """The last allocation that did not fit, None if all did."""
        if not self.replayed.failures:
            return None
        from ligerprof.analyzers.explain.failure import judge_failures

        with collector_paused():
            return judge_failures(self.attribution, stacks=self._stacks)

    @cached_property
    def suggestions(self) -> tuple[Suggestion, ...]:
        """Changes that lower the peak, or that let the failed allocation pass, the cheapest first."""
        with collector_paused():
            found = find_suggestions(self._case, self._recipe)
            if Framework.LIGERPROF in self._case.program.frameworks:
                # of a step of ours, `advise` finds the options
                return found
            return with_settings(found, self.alloc_confs, self.out_of_memory)

    @cached_property
    def alloc_confs(self) -> tuple[SettingsOutcome, ...] | None:
        """Other settings of the allocator, best first; see `other_settings`."""
        with collector_paused():
            return other_settings(self.replayed, thorough=self._thorough)

    def bytes_after(self, suggestion: Suggestion) -> Int64s | None:
        """Allocated bytes at each moment with one of the suggestions, None if not computed."""
        with collector_paused():
            after = bytes_after(suggestion, self._case)
            # the change is computed up to the failure
            return None if after is None else np.append(after, self.replayed.allocated_bytes[len(after) :])

    @cached_property
    def _case(self) -> Case:
        failures = self.replayed.failures
        is_covered = failures and (isinstance(self.window, slice) or np.isin(failures[-1], self.window))
        failed = failures[-1] if is_covered else None
        if failed is None:
            own = self.attribution
            return Case(attribution=own, whole=own, window=self.window, peak_moment=self.peak_moment)
        # what follows a failure says nothing about what was held then; the event itself has the request
        window = self.window if isinstance(self.window, slice) else self.window[self.window <= failed]
        return Case(
            attribution=self.attribution.until(failed + 1),
            whole=self.attribution,
            window=window,
            peak_moment=min(self.peak_moment, failed),
            failed=failed,
        )

    @cached_property
    def timeline(self) -> RoleTimeline:
        """Roles over the whole recording, in full detail around the peak and the failure."""
        return self.timeline_of(MOST_COLUMNS)

    def timeline_of(self, columns: int) -> RoleTimeline:
        """Roles over the whole recording in a number of columns, with more around the peak and the failure."""
        with collector_paused():
            return role_timeline(self.attribution, self.role_codes, self.marked_moments, columns=columns)

    def lives(self, most: int = MOST_LISTED) -> BlockLives:
        """The blocks worth listing one by one: those of the marked moments, and the largest of all others."""
        return list_lives(self.replayed, self.marked_moments, most=most)

    @cached_property
    def role_codes(self) -> Int64s:
        """Index in `ROLES` of each block of the recording, as seen from the peak; of the failure's, from there."""
        codes = np.zeros(len(self.replayed.block_bytes), dtype=np.int64)
        chosen = [(moment, self.replayed.live_at(moment)) for moment in reversed(self.marked_moments)]
        for moment, blocks in ((self.peak_moment, np.arange(len(codes), dtype=np.int64)), *chosen):
            codes[blocks] = self.attribution_at(moment).role_codes_of(blocks, moment)
        return codes

    def attribution_at(self, moment: int) -> Attribution:
        """The attribution of a marked moment: what was freed after a failure says nothing about it."""
        return self.attribution if moment == self.peak_moment else self.attribution.until(moment)

    @property
    def marked_moments(self) -> tuple[int, ...]:
        """The moments that pages show in full: the peak, and the failed allocation if there is one."""
        return (self.peak_moment, *self.replayed.failures[-1:])

    def group(self, owners: Owners) -> tuple[BlockGroup, ...]:
        """Group blocks, by stack too if the analysis was asked for stacks."""
        return group_blocks(owners, by_stack=self._stacks)

    def owners_at(self, moment: int) -> Owners:
        """The owners of the blocks that are live at a marked moment; their call sites are numbered per moment."""
        return self._owners if moment == self.peak_moment else self.attribution_at(moment).owners_at(moment)

    @cached_property
    def _owners(self) -> Owners:
        return self.attribution.owners_at(self.peak_moment)

    def _growth(self) -> Growth | None:
        """What grew most up to the failure, or without one up to the peak."""
        if self.out_of_memory is not None:
            return next(iter(self.out_of_memory.growth), None)
        growth = find_growth(self.attribution, self.peak_moment, self._owners, least_steps=_LEAST_STEPS)
        return next(iter(growth), None)

    def _find_window(self) -> Window:
        if self._step is None:
            return self._known_moments()
        phases, source = self.attribution.phases, self.replayed.source
        if not phases.stamped:
            raise SnapshotFormatError(f"{source}: the events have no steps. `ligerprof step` records them.")
        moments = [each for phase in STEP_PHASES for each in phases.moments_of(phase, self._step)]
        window = np.unique(np.concatenate(moments))
        if not len(window):
            raise SnapshotFormatError(f"{source}: no event of step {self._step}. Record that step.")
        return window

    def _known_moments(self) -> Window:
        phases, made = self.attribution.phases, self.replayed.allocated_by
        if not phases.stamped:
            return slice(None)
        has_calls = self.attribution.call_sites.at(lambda site: site.has_calls)
        known, steps = (np.unique(phases.steps[made[each & (made >= 0)]]) for each in (has_calls, ~has_calls))
        without = steps[~np.isin(steps, known)]
        moments = np.flatnonzero(~np.isin(np.append(0, phases.steps), without))
        failed_there = self.replayed.failures and self.replayed.failures[-1] not in moments
        return slice(None) if not len(known) or not len(without) or failed_there else moments

    def _phase_peaks(self) -> dict[Phase, int]:
        peaks = {}
        for phase in REPORTED_PHASES:
            moments = self.attribution.phases.moments_of(phase, self._step)
            allocated = [int(self.replayed.allocated_bytes[each].max()) for each in moments if len(each)]
            # of the whole run, what the recording leaves out counts, too
            left_out = 0 if self._step is not None else self._left_out.get(phase, 0)
            if allocated or left_out:
                peaks[phase] = max([*allocated, left_out])
        return peaks

    def _unattributed_notes(self) -> list[str]:
        """Why memory has no role at the failure, or without one at the peak."""
        moment = self.marked_moments[-1]
        allocated_bytes = int(self.replayed.allocated_bytes[moment])
        return unattributed_notes(self.attribution_at(moment), self.owners_at(moment), allocated_bytes)

    def _higher_notes(self) -> list[str]:
        """A higher peak in a step whose allocations have no calls."""
        highest, allocated = self.replayed.peak_moment(), self.replayed.allocated_bytes
        if self._step is not None or allocated[highest] <= allocated[self.peak_moment]:
            return []
        peak, step = format_bytes(int(allocated[highest])), self.attribution.phases.step_at(highest - 1)
        return [f"step {step} reached a higher peak, {peak}; --steps {step} records its stacks"]

    def _replay_notes(self) -> list[str]:
        replayed, notes = self.replayed, []
        beyond = replayed.allocated_bytes - replayed.reserved_bytes
        if replayed.segments and beyond.max() > 0:
            moment = int(beyond.argmax())
            allocated, reserved = (
                format_bytes(int(each[moment])) for each in (replayed.allocated_bytes, replayed.reserved_bytes)
            )
            notes.append(
                f"the file is damaged: after {moment} events, {allocated} are allocated of {reserved} reserved, which"
                " no allocator does; the peak and its roles may be wrong"
            )
        if not replayed.last_moment:
            notes.append(
                "no events: this is the memory at the time of the snapshot; switch the history on before the program"
                " starts, with torch.cuda.memory._record_memory_history()"
            )
        elif not replayed.complete and (replayed.allocated_bytes[0] or not replayed.mismatches):
            before = format_bytes(int(replayed.allocated_bytes[0]))
            # each older block required at least one event
            least = replayed.last_moment + len(replayed.older_blocks)
            lengths = np.diff(step_starts(self.attribution.phases))
            notes.append(
                f"the recording does not reach back to an empty device: {before} were allocated before its first"
                f" event; record from the start, with a max_entries of more than {least}"
                + (f" ({int(lengths.max())} for each further step)" if len(lengths) else "")
            )
        if self.attribution.call_sites.is_cut:
            count = len(self.attribution.call_sites.sites)
            notes.append(f"more than {count - 1} call sites; the stacks and modules of the others are left out")
        if replayed.complete and not replayed.verified and not replayed.mismatches:
            notes.append("the file has no segments that the replay could be checked against")
        elif not replayed.verified:
            notes.append(f"the replay does not end in the file's segments ({replayed.mismatches} events do not fit)")
        return notes


def analyze(  # noqa: PLR0913 - one argument per option
    source: str | Path | Snapshot,
    *,
    device_index: int | None = None,
    step: int | None = None,
    rules: Sequence[UserRule] = (),
    stacks: bool = False,
    recipe: "TrainingRecipe | None" = None,
    consume: bool = False,
    all_settings: bool = False,
) -> SnapshotAnalysis:
    """Replay and attribute one device of a snapshot.

    Args:
        source: a snapshot file, a run directory, or a snapshot that has been read.
        device_index: None chooses the device with the highest peak.
        step: restricts the peak to the training step with this number in the stamps.
        rules: take precedence over the built-in rules for roles; `read_rules` reads them from a file.
        stacks: group blocks by stack too, and keep each group's stack.
        recipe: of the recorded step, for commands in suggestions; by default, that of a run directory.
        consume: the caller does not need the snapshot any more, so that its memory can be used again.
        all_settings: search all settings of the allocator, however long the recording is.

    Raises:
        SnapshotFormatError: not a snapshot, or it lacks the device or the step.
    """
    with collector_paused():
        is_ours = consume or not isinstance(source, Snapshot)
        snapshot = source if isinstance(source, Snapshot) else read_snapshot(source)
        if recipe is None and not isinstance(source, Snapshot) and Path(source).is_dir():
            from ligerprof.recipe.flags import read_run_recipe

            recipe = read_run_recipe(Path(source))
        replayed, notes = _choose_device(snapshot, device_index, consume=is_ours)
        attribution = Attribution(replayed, snapshot.annotations, rules, snapshot.saved_tensors)
        notes += snapshot.notes_of(replayed.device)
        return SnapshotAnalysis(
            replayed,
            attribution,
            step=step,
            stacks=stacks,
            notes=notes,
            recipe=recipe,
            all_settings=all_settings,
            left_out=snapshot.phase_peaks,
        )


def explain(
    source: str | Path | Snapshot,
    *,
    device_index: int | None = None,
    step: int | None = None,
    rules: Sequence[UserRule] = (),
    stacks: bool = False,
) -> PeakReport:
    """Report what the memory at a snapshot's peak belongs to; arguments and errors as in `analyze`."""
    return analyze(source, device_index=device_index, step=step, rules=rules, stacks=stacks).peak


def _choose_device(snapshot: Snapshot, device_index: int | None, *, consume: bool) -> tuple[Replay, list[str]]:
    """Replay the requested device, or the one with the highest peak; a note gives the other devices' peaks.

    Args:
        consume: as in `replay`.
    """
    devices = snapshot.devices
    if not devices:
        raise EmptySnapshotError(f"{snapshot.source}: neither events nor segments. Was the history switched on?")
    if device_index is not None:
        if device_index not in devices:
            known = ", ".join(map(str, devices))
            raise SnapshotFormatError(f"{snapshot.source}: has no device {device_index}, only {known}.")
        return replay(snapshot, device_index, consume=consume), []
    replays = [replay(snapshot, device, consume=consume) for device in devices]
    highest = max(replays, key=lambda replayed: int(replayed.allocated_bytes.max()))
    others = [
        f"device {replayed.device} peaks at {format_bytes(int(replayed.allocated_bytes.max()))}"
        for replayed in replays
        if replayed is not highest
    ]
    note = f"this is device {highest.device}, the highest of {len(replays)}; {', '.join(others)}"
    return highest, [note] if others else []
