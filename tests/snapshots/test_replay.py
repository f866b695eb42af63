import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ligerprof.errors import SnapshotFormatError
from ligerprof.snapshots.reader import Snapshot, read_snapshot
from ligerprof.snapshots.replay import replay
from tests.paths import RECORDINGS
from tests.torch_memory.allocator.programs import MIB, SlowAllocator, random_program

# torch.cuda.max_memory_allocated() and max_memory_reserved() of the recorded runs
MEASURED = {
    "hf-ckpt-4x1024": (14124071936, 17777557504),
    "liger-flce-ckpt-4x1024": (10538196480, 11096031232),
    "hf-nockpt-8x1024": (34470623232, 35989225472),
    "hf-4.45-ckpt-4x1024": (14120016896, 17844666368),
    "zero3-offload-4x1024": (9727049216, 11356078080),
    "stamped-amp-ckpt-4x1024": (23276776960, 26168262656),
    "small-expandable": (1044328448, 1247805440),
    "small-ring-3000-expandable": (1044328448, 1289748480),
    "small-streams": (1051144192, 1553989632),
    "small-late": (1051144192, 1126170624),
    "small-python-alloc-nockpt": (1236021248, 1516240896),
    "small-sgd-accum": (1054532608, 1384120320),
    "small-zero2": (1516271104, 1818230784),
    "small-zero3": (1920782848, 2143289344),
}
# one process that trained on two devices
MEASURED_ON_TWO = {0: (443799040, 482344960), 1: (540271104, 648019968)}
LOST_THEIR_BEGINNING = {"small-ring-3000-expandable", "small-late"}


def test_a_compiled_model_s_recording_is_read_although_a_line_is_unknown() -> None:
    """An unknown line is -1, which torch writes as an unsigned integer, 2**64 - 1."""
    snapshot = read_snapshot(RECORDINGS / "compiled.pickle.xz")

    lines = {frame["line"] for event in snapshot.trace_of(0) for frame in event["frames"]}
    assert max(lines) == 2**64 - 1
    replayed = replay(snapshot, 0)
    assert replayed.allocated_bytes.max() == 4393146880
    assert replayed.verified
    assert replayed.complete


@pytest.mark.parametrize("name", sorted(MEASURED))
def test_replay_gives_the_measured_peaks_to_the_byte(name: str) -> None:
    replayed = replay(read_snapshot(RECORDINGS / f"{name}.pickle.xz"), 0)

    assert (replayed.allocated_bytes.max(), replayed.reserved_bytes.max()) == MEASURED[name]
    assert replayed.complete == (name not in LOST_THEIR_BEGINNING)
    assert replayed.verified


def test_replay_keeps_devices_apart() -> None:
    snapshot = read_snapshot(RECORDINGS / "small-two-devices.pickle.xz")

    assert list(snapshot.devices) == sorted(MEASURED_ON_TWO)
    for device, measured in MEASURED_ON_TWO.items():
        replayed = replay(snapshot, device)
        assert (replayed.allocated_bytes.max(), replayed.reserved_bytes.max()) == measured
        assert replayed.complete
        assert replayed.verified


@pytest.mark.parametrize("name", ["hf-ckpt-4x1024", "hf-nockpt-8x1024"])
@pytest.mark.parametrize("kept", [3000, 9000])
def test_replay_of_a_truncated_recording_is_exact_for_the_remaining_events(name: str, kept: int) -> None:
    snapshot = read_snapshot(RECORDINGS / f"{name}.pickle.xz")
    whole = replay(snapshot, 0)
    dropped = len(snapshot.trace_of(0)) - kept
    cut = Snapshot(
        source="cut",
        segments=snapshot.segments,
        device_traces=[list(snapshot.trace_of(0)[dropped:])],
        settings=snapshot.settings,
    )

    replayed = replay(cut, 0)

    assert np.array_equal(replayed.allocated_bytes, whole.allocated_bytes[dropped:])
    assert np.array_equal(replayed.reserved_bytes, whole.reserved_bytes[dropped:])
    assert not replayed.complete
    assert replayed.verified


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), expandable=st.booleans())
def test_replay_agrees_with_a_slow_allocator_at_every_moment(seed: int, expandable: bool) -> None:
    program = random_program(seed, expandable=expandable)

    replayed = replay(Snapshot.from_dict(program.snapshot()), 0)

    assert replayed.allocated_bytes.tolist() == program.allocated
    assert replayed.reserved_bytes.tolist() == program.reserved
    assert replayed.complete
    assert replayed.verified
    for moment in range(0, replayed.last_moment + 1, 7):
        live = replayed.requested_bytes[replayed.live_at(moment)]
        assert sorted(live.tolist()) == sorted(program.owners[moment].values())


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), expandable=st.booleans(), data=st.data())
def test_truncated_replay_of_small_blocks_is_exact(seed: int, expandable: bool, data: st.DataObject) -> None:
    program = random_program(seed, expandable=expandable, small_only=True)
    drop = data.draw(st.integers(1, len(program.events)))

    replayed = replay(Snapshot.from_dict(program.snapshot(drop=drop)), 0)

    assert replayed.allocated_bytes.tolist() == program.allocated[drop:]
    assert replayed.reserved_bytes.tolist() == program.reserved[drop:]
    assert replayed.verified


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_truncated_replay_misses_at_most_the_unsplit_remainder_of_freed_large_blocks(
    seed: int, data: st.DataObject
) -> None:
    program = random_program(seed)
    drop = data.draw(st.integers(1, len(program.events)))

    replayed = replay(Snapshot.from_dict(program.snapshot(drop=drop)), 0)

    freed_large = sum(1 for block in replayed.older_blocks if block.block_bytes > MIB)
    missed = np.array(program.allocated[drop:]) - replayed.allocated_bytes
    assert replayed.reserved_bytes.tolist() == program.reserved[drop:]
    assert missed.min() >= 0
    assert missed.max() <= freed_large * MIB
    assert missed[-1] == 0


def test_replay_without_events_takes_the_blocks_from_the_segments() -> None:
    program = random_program(1)

    replayed = replay(Snapshot.from_dict({**program.snapshot(), "device_traces": [[]]}), 0)

    assert replayed.allocated_bytes.tolist() == program.allocated[-1:]
    assert replayed.reserved_bytes.tolist() == program.reserved[-1:]
    assert not replayed.complete


def test_block_that_waits_for_a_stream_is_neither_allocated_nor_free() -> None:
    program = SlowAllocator()
    program.alloc(1, 3 * MIB)
    program.request_free(1)
    program.alloc(2, 3 * MIB)

    replayed = replay(Snapshot.from_dict(program.snapshot()), 0)

    assert replayed.allocated_bytes.tolist() == program.allocated
    assert replayed.allocated_by.tolist() == [1, 3]
    assert replayed.verified


def test_events_that_move_no_memory_and_unknown_events_are_skipped() -> None:
    program = random_program(3)
    values = program.snapshot()
    strange = [
        {"action": "oom", "size": 2**30, "device_free": 12, "stream": 0, "frames": []},
        {"action": "snapshot", "addr": 0, "size": 0, "stream": 0},
        {"action": "annotate", "addr": 0, "size": 0, "user_metadata": "mine"},
        {"action": "from_the_future"},
    ]
    values["device_traces"] = [[*values["device_traces"][0], *strange]]

    replayed = replay(Snapshot.from_dict(values), 0)

    assert replayed.allocated_bytes.max() == max(program.allocated)
    assert replayed.verified


def test_roundup_divisions_are_taken_from_the_settings() -> None:
    events = [
        {"action": "segment_alloc", "addr": 2**40, "size": 20 * MIB},
        {"action": "alloc", "addr": 2**40, "size": 5 * MIB},
    ]
    values = {
        "device_traces": [events],
        "segments": [],
        "allocator_settings": {"roundup_power2_divisions": {str(2**power): 4 for power in range(16)}},
    }

    replayed = replay(Snapshot.from_dict(values), 0)

    assert replayed.block_bytes.tolist() == [5 * MIB]
    values["device_traces"][0][1]["size"] = 5 * MIB + 1
    assert replay(Snapshot.from_dict(values), 0).block_bytes.tolist() == [6 * MIB]


@pytest.mark.parametrize(
    "event",
    [
        {"addr": 1, "size": 1},
        {"action": 7},
        {"action": "alloc", "addr": "0x10", "size": 1},
        {"action": "alloc", "addr": 16, "size": -1},
        {"action": "alloc", "addr": 16, "size": 2**60},
        {"action": "alloc", "addr": None, "size": 1},
    ],
    ids=["no-action", "number-action", "text-address", "negative", "huge", "none"],
)
def test_invalid_event_is_one_clear_error(event: dict[str, object]) -> None:
    with pytest.raises(SnapshotFormatError, match=r"device 0.*"):
        replay(Snapshot.from_dict({"device_traces": [[event]], "segments": []}), 0)
