import dataclasses
import re
from typing import Any

import pytest

from ligerprof.analyzers.explain.analysis import explain
from ligerprof.reports.peak import failure_lines, finding_lines
from ligerprof.roles import Phase
from ligerprof.snapshots.reader import Snapshot, read_snapshot
from ligerprof.snapshots.replay import replay
from ligerprof.snapshots.stamp import Stamp
from tests.paths import RECORDINGS
from tests.sampling import sampled
from tests.torch_memory.allocator.programs import MIB, SlowAllocator


def stamped(program: SlowAllocator, step: int, phase: Phase, work: Any, module: str = "") -> None:
    first = len(program.events)
    work()
    for event in program.events[first:]:
        event["user_metadata"] = Stamp(step=step, phase=phase, module=module).to_text()


def free(program: SlowAllocator, owner: int) -> None:
    program.request_free(owner)
    program.complete_free(owner)


def training(steps: int, *, kept_bytes: int) -> SlowAllocator:
    """Steps with an activation of 8 MiB; each step leaves `kept_bytes` behind."""
    program = SlowAllocator()
    stamped(program, 0, Phase.BUILD, lambda: program.alloc(1, 4 * MIB))
    for step in range(1, steps + 1):
        base = 10 * step
        stamped(program, step, Phase.FORWARD, lambda b=base: program.alloc(b, 8 * MIB), "model.layers.0")
        if kept_bytes:
            stamped(program, step, Phase.FORWARD, lambda b=base: program.alloc(b + 1, kept_bytes), "model.layers.1")
        stamped(program, step, Phase.BACKWARD, lambda b=base: program.alloc(b + 2, 4 * MIB))
        stamped(program, step, Phase.BACKWARD, lambda b=base: free(program, b))
        stamped(program, step, Phase.OPTIMIZER, lambda b=base: free(program, b + 2))
    return program


def test_steps_have_their_own_peaks() -> None:
    steps = explain(Snapshot.from_dict(training(3, kept_bytes=2 * MIB).snapshot())).steps

    assert [peaks.step for peaks in steps] == [1, 2, 3]
    for index, peaks in enumerate(steps):
        kept = (4 + 2 * index) * MIB
        assert peaks.phases == {
            Phase.FORWARD: kept + 10 * MIB,
            Phase.BACKWARD: kept + 14 * MIB,
            Phase.OPTIMIZER: kept + 6 * MIB,
        }


def test_steps_of_recordings_without_stamps_are_counted() -> None:
    report = explain(RECORDINGS / "hf-ckpt-4x1024.pickle.xz")

    assert [peaks.step for peaks in report.steps] == [1, 2]
    for phase, size_bytes in report.phases.items():
        assert max(peaks.phases.get(phase, 0) for peaks in report.steps) == size_bytes
    assert report.growth is None
    assert report.out_of_memory is None


@pytest.mark.parametrize(("steps", "kept_bytes"), [(6, 0), (3, 2 * MIB)])
def test_freed_memory_or_too_few_steps_are_not_growth(steps: int, kept_bytes: int) -> None:
    assert explain(Snapshot.from_dict(training(steps, kept_bytes=kept_bytes).snapshot())).growth is None


def test_growth_names_the_remaining_blocks() -> None:
    report = explain(Snapshot.from_dict(training(6, kept_bytes=2 * MIB).snapshot()))

    growth = report.growth
    assert growth is not None
    assert (growth.per_step_bytes, growth.steps, growth.who) == (2 * MIB, 5, "model.layers.1")
    assert any("Grew by 2.0 MiB in each of 5 steps" in line for line in finding_lines(report))


def test_real_out_of_memory_is_judged() -> None:
    report = explain(RECORDINGS / "stamped-oom.pickle.xz")

    oom = report.out_of_memory
    assert oom is not None
    assert (oom.requested_bytes, oom.allocated_bytes, oom.reserved_bytes) == (8405385216, 16457218048, 16951279616)
    assert oom.reserved_free_bytes == oom.reserved_bytes - oom.allocated_bytes
    assert (oom.largest_free_bytes, oom.device_free_bytes, oom.fragmented) == (335544320, 132430036992, False)
    assert sum(pin.free_bytes for pin in oom.pins) == oom.reserved_free_bytes
    for pin in oom.pins:
        assert sum(pin.roles.values()) <= pin.segment_bytes - pin.free_bytes
    assert "a limit on this process was reached" in "\n".join(failure_lines(oom))
    assert [one.name for one in report.suggestions if one.lets_pass][:1] == ["fused-loss"]


@sampled("name", ["hf-ckpt-4x1024", "small-sgd-accum", "stamped-amp-ckpt-4x1024", "small-late"], every=2)
def test_an_optimizer_step_that_moves_nothing_has_its_peak_too(name: str) -> None:
    snapshot = read_snapshot(RECORDINGS / f"{name}.pickle.xz")
    replayed = replay(snapshot, 0)
    began = [
        note["time_us"]
        for note in snapshot.annotations
        if note["name"].startswith("Optimizer.step#") and note["stage"] == "START"
    ]
    before = [sum(event["time_us"] < time for event in snapshot.trace_of(0)) for time in began]

    report = explain(snapshot)

    last = report.steps[-1]
    assert last.phases[Phase.OPTIMIZER] == replayed.allocated_bytes[before[-1]]
    assert report.phases[Phase.OPTIMIZER] >= max(replayed.allocated_bytes[moment] for moment in before)


@pytest.mark.parametrize("kept", [900, 2000])
def test_a_truncated_ring_reports_the_max_entries_it_needed(kept: int) -> None:
    snapshot = read_snapshot(RECORDINGS / "small-streams.pickle.xz")
    events = list(snapshot.trace_of(0))
    lost = dataclasses.replace(snapshot, device_traces=[events[-kept:]])

    report = explain(lost)

    found = re.search(r"were allocated before .*max_entries of more than (\d+)", " ".join(report.notes))
    assert found
    assert not report.complete
    # a lower bound: at most the events that occurred, and more than were kept
    assert kept < int(found.group(1)) <= len(events)
