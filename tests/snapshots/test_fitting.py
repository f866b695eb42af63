"""The replay in columns gives what the replay event by event gives, or leaves the trace to it."""

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ligerprof.snapshots import replay as replaying
from ligerprof.snapshots.reader import Snapshot, read_snapshot
from ligerprof.snapshots.replay import Replay, replay
from tests.paths import RECORDINGS
from tests.snapshots.test_repetition import assert_equal, damaged, with_stacks
from tests.torch_memory.allocator.programs import random_program


def both(snapshot: Snapshot, device: int = 0) -> tuple[Replay, Replay, bool]:
    """The replay with columns as far as possible, that without, and whether columns were used."""
    used = []

    def spy(*arguments: object) -> object:
        found = original(*arguments)
        used.append(found is not None)
        return found

    original = replaying.replay_fitting
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replaying, "_LEAST_EVENTS_IN_COLUMNS", 0)
        patch.setattr(replaying, "replay_fitting", spy)
        fast = replay(snapshot, device)
        patch.setattr(replaying, "replay_fitting", lambda *arguments: None)
        slow = replay(snapshot, device)
    return fast, slow, used == [True]


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    events=st.integers(1, 200),
    drop=st.floats(0, 1),
    small_only=st.booleans(),
    has_stacks=st.booleans(),
)
def test_columns_give_what_the_events_give(
    seed: int, events: int, drop: float, small_only: bool, has_stacks: bool
) -> None:
    program = random_program(seed, events=events, small_only=small_only)
    values = program.snapshot()
    trace = list(with_stacks(program.events)) if has_stacks else program.events
    dropped = int(drop * len(trace))
    snapshot = Snapshot.from_dict({**values, "device_traces": [trace[dropped:]]})

    fast, slow, used = both(snapshot)

    assert_equal(fast, slow)
    if not dropped:
        assert used


def misplaced(events: list[dict[str, Any]], draw: random.Random) -> list[dict[str, Any]]:
    """The events with a block, from its allocation to its release, at another address or of another size."""
    changed = [dict(event) for event in events]
    start = draw.choice([number for number, event in enumerate(events) if event["action"] == "alloc"])
    address = events[start]["addr"]
    moved = draw.choice([0, 0, 0, 0, -512, 512, 1024, 2**20, 2**21, 2**30])
    size = events[start]["size"] * (1 if moved else draw.choice([2, 3, 5, 9]))
    for number, event in enumerate(events[start:], start):
        if event["addr"] == address and "segment" not in event["action"]:
            if number > start and event["action"] == "alloc":
                break
            changed[number] |= {"addr": address + moved, "size": size}
    return changed


def reordered(events: list[dict[str, Any]], draw: random.Random) -> list[dict[str, Any]]:
    """The events with one of them, often a segment's, earlier or later."""
    changed = list(events)
    of_segments = [number for number, event in enumerate(events) if "segment" in event["action"]]
    event = changed.pop(draw.choice([*of_segments, draw.randrange(len(events))]))
    changed.insert(draw.randrange(len(events)), event)
    return changed


CHANGES = {"damaged": lambda *arguments: list(damaged(*arguments)), "misplaced": misplaced, "reordered": reordered}


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), expandable=st.booleans(), change=st.sampled_from([*CHANGES, "segments", "settings"]))
def test_columns_leave_what_does_not_fit(seed: int, expandable: bool, change: str) -> None:
    draw = random.Random(seed)
    program = random_program(seed, events=100, expandable=expandable and change == "settings")
    if draw.random() < 0.7:
        # what ends empty fits its segments, however wrong its events are
        for owner in program.live():
            program.request_free(owner)
        for owner in program.pending():
            program.complete_free(owner)
    values, trace = program.snapshot(), program.events
    if change in CHANGES:
        trace = CHANGES[change](trace, draw)
    elif change == "segments":
        draw.choice(values["segments"] or [{}])["total_size"] = draw.choice([2**21, 2**22])
        blocks = [block for segment in values["segments"] for block in segment["blocks"]]
        draw.choice(blocks or [{}])["size"] = draw.choice([512, 2**21, 2**22])
    else:
        values["allocator_settings"]["max_split_size"] = draw.choice([2**21, 2**25])
    snapshot = Snapshot.from_dict({**values, "device_traces": [trace[draw.choice([0, 0, 30]) :]]})

    fast, slow, _ = both(snapshot)

    assert_equal(fast, slow)


@pytest.mark.parametrize("path", sorted(RECORDINGS.glob("*.pickle.xz")), ids=lambda path: path.name.split(".")[0])
def test_recordings_replayed_in_columns(path: Path) -> None:
    snapshot = read_snapshot(path)
    for device in snapshot.devices:
        fast, slow, used = both(snapshot, device)
        assert_equal(fast, slow)
        # segments of other sizes at the same addresses, and expandable ones, are left to the other replay
        changes = {"segment_free", "segment_map", "segment_unmap"}
        assert used or changes & {event["action"] for event in snapshot.trace_of(device)}


@pytest.mark.parametrize("name", ["hf-nockpt-8x1024", "small-streams", "zero3-offload-4x1024"])
@pytest.mark.parametrize("kept", [50, 1500, 3900])
def test_the_end_of_a_recording_replayed_in_columns(name: str, kept: int) -> None:
    recorded = read_snapshot(RECORDINGS / f"{name}.pickle.xz")
    snapshot = Snapshot(
        source="end",
        segments=recorded.segments,
        device_traces=[list(recorded.trace_of(0))[-kept:]],
        settings=recorded.settings,
    )

    fast, slow, used = both(snapshot)

    assert used
    assert_equal(fast, slow)
