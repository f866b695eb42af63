"""The replay in columns gives what the replay event by event gives, or leaves the trace to it."""

import random
from pathlib import Path

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


@settings(max_examples=300, deadline=None)
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


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), expandable=st.booleans(), part=st.sampled_from(["events", "segments", "settings"]))
def test_columns_leave_what_does_not_fit(seed: int, expandable: bool, part: str) -> None:
    draw = random.Random(seed)
    program = random_program(seed, events=100, expandable=expandable)
    values, trace = program.snapshot(), program.events
    if part == "events":
        trace = list(damaged(trace, draw))
    elif part == "segments":
        draw.choice(values["segments"] or [{}])["total_size"] = draw.choice([2**21, 2**22])
        blocks = [block for segment in values["segments"] for block in segment["blocks"]]
        draw.choice(blocks or [{}])["size"] = draw.choice([512, 2**21, 2**22])
    else:
        values["allocator_settings"]["max_split_size"] = draw.choice([2**21, 2**25])
    snapshot = Snapshot.from_dict({**values, "device_traces": [trace[draw.choice([0, 30]) :]]})

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
