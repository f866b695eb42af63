"""A recording whose history was off in between: its replay fits the allocator's state at both ends and after it."""

import contextlib
import copy
import pickle
import random
from pathlib import Path
from typing import Any

import pytest

from ligerprof.analyzers.explain.analysis import analyze
from ligerprof.roles import Phase, Role
from ligerprof.runs.recording import parts
from ligerprof.runs.recording.parts import Bridge, Parts
from ligerprof.runs.recording.record import Failure
from ligerprof.runs.recording.summary import LatePeak
from ligerprof.snapshots.reader import Snapshot, read_snapshot
from ligerprof.snapshots.replay import replay
from ligerprof.snapshots.stamp import Stamp
from tests.torch_memory.allocator.programs import MIB, SlowAllocator

MANY = 10**6


def joined(
    folder: Path, before: dict[str, Any], bridge: Bridge, later: dict[str, Any] | None, most_entries: int = MANY
) -> Any:
    """One recording of two and what is between them; the peak is at the end."""
    found = Parts(folder, most_entries=most_entries, keeps_all=True)
    found.add(before, step=1, peak_bytes=1)
    found.cross(bridge, peak_bytes=2)
    if later is not None:
        found.add(later, step=4, peak_bytes=3)
    return found.joined(at_end=False)[0]


class Program:
    """Allocates, frees and empties the cache at random; some blocks wait for another stream."""

    def __init__(self, seed: int, *, expandable: bool) -> None:
        self.draw = random.Random(seed)
        self.allocator = SlowAllocator(expandable=expandable)
        self.count = 0
        # blocks that were allocated while the history was on have frames
        self.framed: set[int] = set()

    def run(self, actions: int, *, recorded: bool) -> None:
        draw, allocator = self.draw, self.allocator
        for _ in range(actions):
            live, pending = allocator.live(), allocator.pending()
            choice = draw.random()
            if choice < 0.5 or not live:
                size = draw.choice(
                    [draw.randint(1, 4000), draw.randint(MIB // 2, 3 * MIB), draw.randint(MIB, 40 * MIB)]
                )
                allocator.alloc(self.count, size, stream=draw.choice([0, 0, 7]))
                if recorded:
                    self.framed.add(self.count)
                self.count += 1
            elif choice < 0.85:
                owner = draw.choice(live)
                allocator.request_free(owner)
                if draw.random() < 0.8:
                    allocator.complete_free(owner)
            elif choice < 0.95 and pending:
                allocator.complete_free(draw.choice(pending))
            elif choice > 0.97:
                allocator.empty_cache()

    def snapshot(self, first_event: int, last_event: int | None = None) -> dict[str, Any]:
        taken = copy.deepcopy(self.allocator.snapshot())
        framed = {
            piece.address
            for segment in self.allocator.segments
            for piece in segment.pieces
            if piece.owner in self.framed
        }
        for segment in taken["segments"]:
            address = segment["address"]
            for block in segment["blocks"]:
                block["frames"] = [{"name": "f", "filename": "f.py", "line": 1}] if address in framed else []
                address += block["size"]
        taken["device_traces"] = [copy.deepcopy(self.allocator.events[first_event:last_event])]
        return taken


@pytest.mark.parametrize("expandable", [False, True], ids=["segments", "expandable"])
@pytest.mark.parametrize("seed", range(12))
def test_the_replay_passes_over_the_gap(seed: int, expandable: bool, tmp_path: Path) -> None:
    program = Program(seed, expandable=expandable)
    program.run(60, recorded=True)
    before = program.snapshot(0)
    first_moment = len(program.allocator.events)
    program.run(80, recorded=False)
    gap_end = len(program.allocator.events)
    after = program.snapshot(gap_end)
    program.run(60, recorded=True)
    later = program.snapshot(gap_end)

    found = joined(tmp_path, before, Bridge(after, {}, 3, 5), later)

    (tmp_path / "joined.pickle").write_bytes(pickle.dumps(found))
    replayed = replay(read_snapshot(tmp_path / "joined.pickle"), 0)
    assert (replayed.mismatches, replayed.verified, replayed.complete) == (0, True, True)
    truth = program.allocator.allocated
    assert replayed.allocated_bytes[: first_moment + 1].tolist() == truth[: first_moment + 1]
    assert replayed.allocated_bytes[-len(truth[gap_end:]) :].tolist() == truth[gap_end:]
    assert replayed.reserved_bytes[-1] == program.allocator.reserved[-1]


def test_what_the_gap_leaves_has_the_roles_that_are_known_and_no_others(tmp_path: Path) -> None:
    allocator = SlowAllocator()
    frame = {"name": "f", "filename": "f.py", "line": 1}

    def make(phase: Phase, step: int, *owners: int, framed: bool = True, size: int = MIB) -> None:
        for owner in owners:
            first = len(allocator.events)
            allocator.alloc(owner, size * (owner + 1))
            for event in allocator.events[first:]:
                event["user_metadata"] = Stamp(step=step, phase=phase).to_text()
                event["frames"] = [frame] if framed else []

    def taken(first: int) -> dict[str, Any]:
        snapshot = copy.deepcopy(allocator.snapshot())
        places = {piece.address for each in allocator.segments for piece in each.pieces if piece.owner in framed}
        for segment in snapshot["segments"]:
            for block in segment["blocks"]:
                block["frames"] = [frame] if block["address"] in places else []
        return {**snapshot, "device_traces": [copy.deepcopy(allocator.events[first:])]}

    framed = {0, 1}
    make(Phase.BUILD, 0, 0, 1)
    make(Phase.FORWARD, 1, 2)
    allocator.request_free(2)
    allocator.complete_free(2)
    before = taken(0)
    make(Phase.OUTSIDE, 2, 3, 4, 5, framed=False)
    end = len(allocator.events)
    address = {piece.owner: piece.address for each in allocator.segments for piece in each.pieces}
    known = {(0, address[3]): Phase.OPTIMIZER, (0, address[4]): Phase.BACKWARD}
    bridge = Bridge(taken(end), known, 2, 5)
    make(Phase.FORWARD, 4, 6)

    (tmp_path / "joined.pickle").write_bytes(pickle.dumps(joined(tmp_path, before, bridge, taken(end))))
    roles = analyze(read_snapshot(tmp_path / "joined.pickle")).peak.roles

    assert roles[Role.PARAMETERS] == 3 * MIB
    assert roles[Role.OPTIMIZER_STATES] == 4 * MIB
    assert roles[Role.GRADIENTS] == 5 * MIB
    assert roles[Role.UNATTRIBUTED] >= 6 * MIB


def test_a_recording_that_lost_its_first_events_stands_alone_and_a_failure_in_the_gap_is_an_event(
    tmp_path: Path,
) -> None:
    program = Program(1, expandable=False)
    program.run(60, recorded=True)
    before = program.snapshot(0)
    program.run(20, recorded=False)
    end = len(program.allocator.events)
    after = program.snapshot(end)
    program.run(20, recorded=True)
    later = program.snapshot(end)
    count = len(later["device_traces"][0])

    alone = joined(tmp_path, before, Bridge(after, {}, 3, 5), later, count)
    assert alone["device_traces"] == later["device_traces"]

    failure = Failure(10, 20, 0, 30).to_event("ligerprof;3;forward;;")
    found = joined(tmp_path, before, Bridge(after, {}, 3, 5, failure), None)
    last = found["device_traces"][0][-1]
    assert (last["action"], last["size"], last["device_free"], last["time_us"]) == ("oom", 10, 30, 5)
    assert replay(Snapshot.from_dict(found), 0).failures == (len(found["device_traces"][0]) - 1,)


@pytest.mark.parametrize("expandable", [False, True], ids=["segments", "expandable"])
@pytest.mark.parametrize("seed", range(6))
def test_a_recording_without_its_first_parts_has_their_blocks_and_the_peak(
    seed: int, expandable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_MOST_EVENTS", 250)
    program, found, start = Program(seed, expandable=expandable), Parts(tmp_path, most_entries=MANY), 0
    for step in range(1, 9):
        program.run(60, recorded=True)
        end = len(program.allocator.events)
        found.add(
            program.snapshot(start, end), step=step + 1, peak_bytes=max(program.allocator.allocated), begins_step=True
        )
        start = end

    taken, steps = found.joined(at_end=False)

    assert steps is not None
    keys = [key for event in taken["device_traces"][0] for key in event]
    assert len({id(key) for key in keys}) == len(set(keys))
    (tmp_path / "joined.pickle").write_bytes(pickle.dumps(taken))
    replayed = replay(read_snapshot(tmp_path / "joined.pickle"), 0)
    assert (replayed.mismatches, replayed.verified, replayed.complete) == (0, True, True)
    assert int(replayed.allocated_bytes.max()) == max(program.allocator.allocated)


@pytest.mark.parametrize("seed", range(6))
def test_phases_have_at_least_the_peaks_of_parts_that_are_left_out(seed: int, tmp_path: Path) -> None:
    program, found, start = Program(seed, expandable=False), Parts(tmp_path, most_entries=MANY), 0
    truth: dict[Phase, int] = {}
    for step, phase in enumerate((Phase.GENERATION, Phase.SCORING, Phase.BACKWARD, Phase.GENERATION), 1):
        program.run(60, recorded=True)
        events, end = program.allocator.events, len(program.allocator.events)
        for number in range(start, end):
            events[number]["user_metadata"] = Stamp(step=step, phase=phase).to_text()
            if events[number]["action"] == "alloc":
                truth[phase] = max(truth.get(phase, 0), program.allocator.allocated[number + 1])
        found.add(program.snapshot(start, end), step=step + 1, peak_bytes=step, begins_step=True)
        start = end

    assert found.phase_peaks.keys() == truth.keys()
    for phase, peak_bytes in truth.items():
        # what a block has beyond its request, because the rest was not worth splitting, is not counted
        assert peak_bytes * 0.9 <= found.phase_peaks[phase] <= peak_bytes


@pytest.mark.parametrize("seed", range(6))
def test_a_part_that_is_left_out_leaves_its_blocks(seed: int, tmp_path: Path) -> None:
    program, found = Program(seed, expandable=False), Parts(tmp_path, most_entries=MANY)
    program.run(60, recorded=True)
    found.add(program.snapshot(0), step=1, peak_bytes=1)
    program.run(80, recorded=True)
    end = len(program.allocator.events)
    evaluation = Stamp(step=1, phase=Phase.EVALUATION).to_text()
    event = {"time_us": 7, "user_metadata": evaluation}
    found.skip(program.snapshot(end), step=2, event=event, begins_step=True)
    program.run(60, recorded=True)
    found.add(program.snapshot(end), step=2, peak_bytes=2)

    taken, steps = found.joined(at_end=False)

    assert steps == (2, 2)
    (tmp_path / "joined.pickle").write_bytes(pickle.dumps(taken))
    replayed = replay(read_snapshot(tmp_path / "joined.pickle"), 0)
    assert (replayed.mismatches, replayed.verified, replayed.complete) == (0, True, True)
    truth = program.allocator.allocated[end:]
    assert replayed.allocated_bytes[-len(truth) :].tolist() == truth


def test_parts_that_the_disk_has_no_room_for_are_dropped_the_one_of_the_peak_last(tmp_path: Path) -> None:
    program = Program(1, expandable=False)
    found, start = Parts(tmp_path, most_entries=MANY, disk_bytes=1, keeps_all=True), 0
    for step, peak_bytes in enumerate((1, 9, 9, 9)):
        program.run(30, recorded=True)
        end = len(program.allocator.events)
        found.add(program.snapshot(start, end), step=step + 1, peak_bytes=peak_bytes, begins_step=True)
        start = end

    assert sorted(file.name for file in (tmp_path / "parts").iterdir()) == ["1", "3"]
    assert found.joined(at_end=False)[1] == (1, 1)
    found.remove()
    assert not list(tmp_path.iterdir())


def test_a_peak_that_the_disk_had_no_room_for_has_its_steps_and_the_rest_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, found, start = Program(1, expandable=False), Parts(tmp_path, most_entries=MANY), 0
    for step, peak_bytes in enumerate((1, 9, 9)):
        program.run(30, recorded=True)
        end = len(program.allocator.events)
        with monkeypatch.context() as patched, contextlib.suppress(OSError):
            if step == 1:
                patched.setattr(Path, "write_bytes", full_disk)
            found.add(program.snapshot(start, end), step=step + 1, peak_bytes=peak_bytes, begins_step=True)
        start = end

    assert found.lost_peak == LatePeak(peak_bytes=9, first_step=1, step=1)
    assert found.joined(at_end=False)[1] in ((0, 0), (2, 2))


def full_disk(_path: Path, _content: bytes) -> None:
    raise OSError(28, "No space left on device")
