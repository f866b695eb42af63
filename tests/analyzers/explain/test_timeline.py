from collections import defaultdict

import numpy as np
import pytest

from ligerprof.analyzers.explain.analysis import analyze, explain
from ligerprof.analyzers.explain.timeline import RoleTimeline
from ligerprof.roles import Phase, Role
from ligerprof.snapshots.reader import Snapshot, read_snapshot
from ligerprof.snapshots.replay import replay
from ligerprof.snapshots.stamp import Stamp
from tests.paths import RECORDINGS
from tests.torch_memory.allocator.programs import MIB, SlowAllocator, random_program

NAMES = ("hf-4.45-ckpt-4x1024", "stamped-amp-ckpt-4x1024", "small-ring-3000-expandable", "small-late")


def bytes_at(timeline: RoleTimeline, column: int) -> dict[Role, int]:
    return {role: int(sizes[column]) for role, sizes in timeline.roles.items()}


@pytest.mark.parametrize("name", NAMES)
def test_every_column_adds_up_and_the_peak_is_the_explained_one(name: str) -> None:
    analysis = analyze(RECORDINGS / f"{name}.pickle.xz")

    report, timeline = analysis.peak, analysis.timeline

    assert (sum(timeline.roles.values()) == timeline.allocated_bytes).all()
    assert timeline.allocated_bytes.max() == timeline.allocated_bytes[timeline.peak_column] == report.peak_bytes
    assert bytes_at(timeline, timeline.peak_column) == {role: report.roles[role] for role in timeline.roles}
    assert timeline.running[timeline.peak_column].phase is report.peak_phase
    assert len(timeline.moments) <= 4000
    assert all(sizes.any() for sizes in timeline.roles.values())


@pytest.mark.parametrize("name", NAMES)
def test_the_largest_holders_at_the_peak_are_the_explained_ones(name: str) -> None:
    snapshot = read_snapshot(RECORDINGS / f"{name}.pickle.xz")
    timeline = analyze(snapshot).timeline

    named_at_peak: dict[Role, dict[tuple[str, str], tuple[int, int]]] = {}
    for holding in timeline.holdings:
        if holding.column <= timeline.peak_column:
            named = ((timeline.holders[index], size, count) for index, size, count in holding.largest)
            named_at_peak[holding.role] = {
                (holder.module, holder.frame): (size, count) for holder, size, count in named
            }

    expected: dict[Role, dict[tuple[str, str], list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    for block in explain(snapshot).blocks:
        module = ".".join("*" if part.isdecimal() else part for part in block.module.split("."))
        sums = expected[block.role][module, block.frame]
        sums[0] += block.size_bytes
        sums[1] += block.count
    for role, holders in expected.items():
        largest = sorted((size for size, _ in holders.values()), reverse=True)[:3]
        assert sorted((size for size, _ in named_at_peak[role].values()), reverse=True) == largest
        assert all(tuple(holders[name]) == figures for name, figures in named_at_peak[role].items())


def test_columns_between_the_peaks_agree_with_attribution() -> None:
    snapshot = read_snapshot(RECORDINGS / "stamped-amp-ckpt-4x1024.pickle.xz")
    attribution = analyze(snapshot).attribution

    timeline = analyze(snapshot).timeline

    for column in (1500, 2000, len(timeline.moments) - 1):
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


def test_long_recordings_lose_no_peak_and_keep_every_event_around_the_highest() -> None:
    program = SlowAllocator()
    for owner in range(12_000):
        program.alloc(owner, 64 * MIB if owner in (5000, 9000) else MIB)
        program.request_free(owner)
        program.complete_free(owner)
    snapshot = Snapshot.from_dict(program.snapshot())
    allocated = replay(snapshot, 0).allocated_bytes

    timeline = analyze(snapshot).timeline

    stops = [*timeline.starts[1:].tolist(), timeline.last_moment + 1]
    for start, stop, held in zip(timeline.starts.tolist(), stops, timeline.allocated_bytes.tolist(), strict=True):
        assert held == allocated[start:stop].max()
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

    running = timeline.running[-1]
    assert (running.step, running.phase, running.module, running.node) == (3, stamp.phase, stamp.module, stamp.node)
    assert timeline.holders[0].module == "model.layers.*.mlp"
    assert timeline.running[0].phase is None


def test_excess_holders_are_merged() -> None:
    program = SlowAllocator()
    for owner in range(2500):
        first = len(program.events)
        program.alloc(owner, MIB if owner < 10 else 512)
        for event in program.events[first:]:
            event["user_metadata"] = Stamp(step=1, phase=Phase.FORWARD, module=f"part{owner}").to_text()

    timeline = analyze(Snapshot.from_dict(program.snapshot())).timeline

    assert len(timeline.holders) <= 2001
    assert any(holder.frame == "others" for holder in timeline.holders)
    assert {f"part{owner}" for owner in range(10)} <= {holder.module for holder in timeline.holders}
