import numpy as np
import pytest

from ligerprof.analyzers.explain.analysis import analyze
from ligerprof.analyzers.explain.timeline import RoleTimeline
from ligerprof.roles import Phase, Role
from ligerprof.snapshots.reader import Snapshot, read_snapshot
from ligerprof.snapshots.replay import replay
from ligerprof.snapshots.stamp import Stamp
from tests import recorded
from tests.paths import RECORDINGS
from tests.sampling import sampled
from tests.torch_memory.allocator.programs import MIB, SlowAllocator, random_program

NAMES = ("hf-4.45-ckpt-4x1024", "stamped-amp-ckpt-4x1024", "small-ring-3000-expandable", "small-late")


def bytes_at(timeline: RoleTimeline, column: int) -> dict[Role, int]:
    return {role: int(sizes[column]) for role, sizes in timeline.roles.items()}


@sampled("name", NAMES, every=2)
def test_every_column_adds_up_and_the_peak_is_the_explained_one(name: str) -> None:
    analysis = recorded.analysis(name)

    report, timeline = analysis.peak, analysis.timeline

    assert (sum(timeline.roles.values()) == timeline.allocated_bytes).all()
    assert timeline.allocated_bytes.max() == timeline.allocated_bytes[timeline.peak_column] == report.peak_bytes
    assert bytes_at(timeline, timeline.peak_column) == {role: report.roles[role] for role in timeline.roles}
    assert timeline.phases()[timeline.peak_column] is report.peak_phase
    assert all(sizes.any() for sizes in timeline.roles.values())


def test_columns_between_the_peaks_agree_with_attribution() -> None:
    snapshot = read_snapshot(RECORDINGS / "stamped-amp-ckpt-4x1024.pickle.xz")
    attribution = analyze(snapshot).attribution

    timeline = analyze(snapshot).timeline

    last = len(timeline.moments) - 1
    for column in (last // 3, last // 2, last):
        moment = int(timeline.moments[column])
        expected = attribution.breakdown(moment, attribution.owners_at(moment))
        assert bytes_at(timeline, column) == {role: expected[role] for role in timeline.roles}


@pytest.mark.parametrize("seed", range(5))
def test_short_recordings_have_every_moment(seed: int) -> None:
    program = random_program(seed)
    timeline = analyze(Snapshot.from_dict(program.snapshot())).timeline

    moments = timeline.last_moment + 1
    assert timeline.moments.tolist() == timeline.starts.tolist() == list(range(moments))
    assert timeline.allocated_bytes.max() == max(program.allocated)


@pytest.mark.slow
def test_long_recordings_lose_no_peak_and_keep_every_event_around_the_highest() -> None:
    program = SlowAllocator()
    for owner in range(60_000):
        program.alloc(owner, 64 * MIB if owner in (5000, 45_000) else MIB)
        program.request_free(owner)
        program.complete_free(owner)
    snapshot = Snapshot.from_dict(program.snapshot())
    allocated = replay(snapshot, 0).allocated_bytes

    timeline = analyze(snapshot).timeline

    stops = [*timeline.starts[1:].tolist(), timeline.last_moment + 1]
    for start, stop, held in zip(timeline.starts.tolist(), stops, timeline.allocated_bytes.tolist(), strict=True):
        assert held == allocated[start:stop].max()
    lowest = [allocated[start:stop].min() for start, stop in zip(timeline.starts.tolist(), stops, strict=True)]
    assert timeline.lowest_bytes.tolist() == lowest
    assert len(stops) < timeline.last_moment
    assert int((timeline.allocated_bytes == 64 * MIB).sum()) == 2
    peak = int(np.argmax(allocated))
    assert set(range(peak - 100, peak + 100)) <= set(timeline.starts.tolist())


def test_running_modules_come_from_stamps() -> None:
    program = SlowAllocator()
    program.alloc(1, MIB)
    stamp = Stamp(step=3, phase=Phase.BACKWARD, module="model.layers.7.mlp", node="MmBackward0")
    for event in program.events:
        event["user_metadata"] = stamp.to_text()

    timeline = analyze(Snapshot.from_dict(program.snapshot())).timeline

    running = timeline.running[timeline.running_of[-1]]
    assert (running.step, running.phase, running.module, running.node) == (3, stamp.phase, stamp.module, stamp.node)
    assert timeline.running[timeline.running_of[0]].phase is None


def test_times_are_those_of_the_events_before_each_column_or_missing() -> None:
    snapshot = read_snapshot(RECORDINGS / "hf-ckpt-4x1024.pickle.xz")
    events = snapshot.trace_of(0)

    timeline = analyze(snapshot).timeline

    assert timeline.times_us is not None
    for column in (0, 1, 700, len(timeline.starts) - 1):
        event = max(int(timeline.starts[column]) - 1, 0)
        assert timeline.times_us[column] == events[event]["time_us"]
    assert timeline.times_us[-1] == events[-1]["time_us"]

    # no times, times that go back, and a simulation's count
    last = len(events) - 1
    for times in ([0] * len(events), [*range(100, 100 + last), 5], list(range(7, 8 + last))):
        without = Snapshot(
            source="no time",
            segments=snapshot.segments,
            device_traces=[[{**event, "time_us": time} for event, time in zip(events, times, strict=True)]],
            settings=snapshot.settings,
        )
        assert analyze(without).timeline.times_us is None
