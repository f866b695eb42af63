"""Answer who holds a device's memory at its peak, from any torch memory snapshot."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ligerprof.analyzers.attribution.blocks import Attribution, Owner, breakdown
from ligerprof.analyzers.attribution.phases import Timeline
from ligerprof.analyzers.attribution.user_rules import OwnRule
from ligerprof.analyzers.explain.failure import judge_out_of_memory
from ligerprof.analyzers.explain.parts import Answers, OutOfMemory
from ligerprof.analyzers.explain.peak import BlockGroup, PeakReport
from ligerprof.analyzers.explain.steps import growth, step_begins, step_peaks
from ligerprof.analyzers.explain.what_if import Window, what_if
from ligerprof.errors import SnapshotFormatError
from ligerprof.roles import STEP_PHASES, Phase, Role
from ligerprof.snapshots.pickles.plain import collector_off
from ligerprof.snapshots.reader import Snapshot, read_snapshot
from ligerprof.snapshots.replay import Replay, replay, state_at
from ligerprof.snapshots.trace import Int64s
from ligerprof.units import format_bytes

SNAPSHOT_NAME = "snapshot.pickle"


def explain(
    source: str | Path | Snapshot,
    *,
    device_index: int | None = None,
    step: int | None = None,
    rules: Sequence[OwnRule] = (),
) -> PeakReport:
    """Replay a snapshot, find its peak, and say who holds it.

    Args:
        source: a snapshot file, a run directory, or a snapshot that was read.
        device_index: which device; None takes the one with the highest peak.
        step: only the training step of this number, as our stamps count; None takes the whole trace.
        rules: asked for a block's role before the built-in ones; `read_rules` reads them from a file.

    Raises:
        SnapshotFormatError: no snapshot, or a device or step that is not in it.
    """
    with collector_off():
        snapshot = source if isinstance(source, Snapshot) else read_snapshot(_snapshot_file(Path(source)))
        return _explain(snapshot, device_index, step, rules)


def _explain(snapshot: Snapshot, device_index: int | None, step: int | None, rules: Sequence[OwnRule]) -> PeakReport:
    replayed, notes = _choose_device(snapshot, device_index)
    attribution = Attribution(replayed, snapshot.annotations, rules)
    window = _window(attribution.timeline, step, snapshot.source)
    moment = _highest(replayed, window)
    owners = attribution.owners_at(moment)
    roles = breakdown(replayed, moment, owners)
    answers = _answers(snapshot, attribution, owners, window)
    return PeakReport(
        device=replayed.device,
        peak_bytes=int(replayed.allocated_bytes[moment]),
        reserved_bytes=int(replayed.reserved_bytes[window].max()),
        complete=replayed.complete,
        roles=roles,
        blocks=_groups(owners),
        phases=_phase_peaks(attribution.timeline, replayed, step),
        peak_phase=_phase_of_moment(attribution.timeline, moment),
        notes=(*notes, *_notes(replayed, attribution.timeline), *_out_of_memory_note(answers)),
        answers=answers,
    )


def _highest(replayed: Replay, window: Window) -> int:
    place = int(np.argmax(replayed.allocated_bytes[window]))
    return place if isinstance(window, slice) else int(window[place])


def _answers(snapshot: Snapshot, attribution: Attribution, owners: Sequence[Owner], window: Window) -> Answers:
    replayed, timeline = attribution.replayed, attribution.timeline
    return Answers(
        steps=step_peaks(timeline, replayed),
        out_of_memory=_out_of_memory(snapshot, attribution),
        what_if=what_if(replayed, attribution.requests, owners, window),
        growth=growth(timeline, replayed, owners),
    )


def _out_of_memory(snapshot: Snapshot, attribution: Attribution) -> OutOfMemory | None:
    """The first allocation that did not fit, judged."""
    replayed = attribution.replayed
    if replayed.out_of_memory is None:
        return None
    event = replayed.out_of_memory
    return judge_out_of_memory(replayed, event, state_at(snapshot, replayed, event), attribution.owners_at(event))


def _snapshot_file(path: Path) -> Path:
    return path / SNAPSHOT_NAME if path.is_dir() else path


def _choose_device(snapshot: Snapshot, device_index: int | None) -> tuple[Replay, list[str]]:
    devices = snapshot.devices
    if not devices:
        raise SnapshotFormatError(f"{snapshot.source}: no events and no segments. Was the history switched on?")
    if device_index is not None:
        if device_index not in devices:
            known = ", ".join(str(device) for device in devices)
            raise SnapshotFormatError(f"{snapshot.source}: nothing of device {device_index} in it. It has: {known}.")
        return replay(snapshot, device_index), []
    replays = [replay(snapshot, device) for device in devices]
    highest = max(replays, key=lambda replayed: int(replayed.allocated_bytes.max()))
    others = [
        f"device {replayed.device} peaks at {format_bytes(int(replayed.allocated_bytes.max()))}"
        for replayed in replays
        if replayed is not highest
    ]
    return highest, [
        f"this is device {highest.device}, the highest of {len(replays)}; {', '.join(others)}"
    ] if others else []


def _window(timeline: Timeline, step: int | None, source: str) -> Window:
    """The moments among which the peak is looked for."""
    if step is None:
        return slice(None)
    if not timeline.stamped:
        raise SnapshotFormatError(f"{source}: its events have no steps. `ligerprof step` writes snapshots that do.")
    window = np.unique(np.concatenate([each for phase in STEP_PHASES for each in _moments(timeline, phase, step)]))
    if not len(window):
        raise SnapshotFormatError(f"{source}: no event of step {step} in it. Record that step.")
    return window


def _moments(timeline: Timeline, phase: Phase, step: int | None) -> list[Int64s]:
    """The moments of a phase: what was held when an event of it came belongs to it, and when a silent one began."""
    events = timeline.events_of(phase, step)
    return [events, events + 1, *([timeline.optimizer_begins(step)] if phase is Phase.OPTIMIZER else [])]


def _phase_peaks(timeline: Timeline, replayed: Replay, step: int | None) -> dict[Phase, int]:
    peaks = {}
    for phase in STEP_PHASES:
        held = [replayed.allocated_bytes[moments] for moments in _moments(timeline, phase, step) if len(moments)]
        if held:
            peaks[phase] = max(int(each.max()) for each in held)
    return peaks


def _phase_of_moment(timeline: Timeline, moment: int) -> Phase | None:
    """The phase of the event that led to a moment."""
    return timeline.phase_at(moment - 1) if moment else None


def _groups(owners: list[Owner]) -> tuple[BlockGroup, ...]:
    """Owners that share all but the block, the most bytes first."""
    grouped: dict[tuple[Role, str, str, Phase, int | None], list[Owner]] = defaultdict(list)
    for owner in owners:
        grouped[owner.role, owner.module, owner.frame, owner.phase, owner.layer].append(owner)
    groups = [
        BlockGroup(
            role=role,
            size_bytes=sum(owner.requested_bytes for owner in members),
            count=len(members),
            module=module,
            frame=frame,
            phase=phase,
            layer=layer,
        )
        for (role, module, frame, phase, layer), members in grouped.items()
    ]
    return tuple(sorted(groups, key=lambda group: -group.size_bytes))


def _notes(replayed: Replay, timeline: Timeline) -> list[str]:
    notes = []
    if not replayed.complete:
        before = int(replayed.allocated_bytes[0])
        # every older block was an event at least
        least = replayed.last_moment + len(replayed.older_blocks)
        lengths = np.diff(step_begins(timeline))
        notes.append(
            f"the recording does not reach back to an empty device: {format_bytes(before)} were allocated before its"
            f" first event; record from the start, with a max_entries of more than {least}"
            + (f" ({int(lengths.max())} for every step more)" if len(lengths) else "")
        )
    if not replayed.verified:
        notes.append(
            f"the replay does not end in the segments the file states ({replayed.mismatches} events do not fit)"
        )
    return notes


def _out_of_memory_note(answers: Answers) -> list[str]:
    oom = answers.out_of_memory
    if oom is None:
        return []
    asked, allocated, reserved = map(format_bytes, (oom.requested_bytes, oom.allocated_bytes, oom.reserved_bytes))
    left = "" if oom.device_free_bytes is None else f", {format_bytes(oom.device_free_bytes)} left on the device"
    return [f"out of memory: {asked} asked for, with {allocated} allocated and {reserved} reserved{left}"]
